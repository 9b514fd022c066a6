"""From our models to the format of H3: the inverse of :mod:`stateline.models.convert.h3`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import H3, Attention, FeedForward, Residual
from stateline.models.config import ModelConfig
from stateline.models.convert.h3 import EMBEDDING, h3_prefixes, official_names
from stateline.models.convert.weights import some_names
from stateline.models.factory import meta_model
from stateline.models.language_model import LanguageModel


def h3_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Official tensors, by released names, from ours; the inverse of :func:`h3_weights`.

    Raises:
        InputError: If the official code has no such model.
    """
    model = meta_model(config)
    assert isinstance(model, LanguageModel)
    _check_official(model)
    ours = dict(tensors)
    for prefix in h3_prefixes(model):
        ours = _taken_apart(ours, prefix)
    official = {theirs: ours.pop(name) for theirs, name in official_names(model).items()}
    if ours:
        raise InputError(f"official H3 models have no place for {some_names(sorted(ours))}")
    for place, link in enumerate(model.stack.links[::2]):
        layer = link.layer if isinstance(link, Residual) else None
        if isinstance(layer, Attention) and layer.position == "rope":
            dims, base = layer.rotary_dims, layer.rope_base
            steps = torch.arange(0, dims, 2, dtype=torch.float32)
            name = f"backbone.layers.{place}.mixer.rotary_emb.inv_freq"
            official[name] = 1.0 / (base ** (steps / dims))
    official["lm_head.weight"] = official[f"{EMBEDDING}weight"]
    return official


def _check_official(model: LanguageModel) -> None:
    """Raise InputError unless the layers are H3 or attention, each with a feed-forward."""
    config, links = model.config, model.stack.links
    mixers = [link.layer for link in links[::2] if isinstance(link, Residual)]
    feed_forwards = [link.layer for link in links[1::2] if isinstance(link, Residual)]
    fits = (
        len(mixers) == len(feed_forwards) == len(links) / 2
        and all(isinstance(mixer, H3 | Attention) for mixer in mixers)
        and all(isinstance(layer, FeedForward) for layer in feed_forwards)
        and (config.norm, config.feed_forward, config.tie_embeddings) == ("layer", "gelu", True)
    )
    if not fits:
        raise InputError(
            "official H3 models consist of h3 and attention, each with a gelu feed-forward, layer "
            f"norms and tied embeddings, got {config.pattern!r}"
        )


def _taken_apart(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The inverse of :func:`_finished`, in the order ``fused``."""
    ours = dict(tensors)
    for part in ("weight", "bias"):
        for name, third in zip("qkv", ours.pop(f"{prefix}qkv.{part}").chunk(3), strict=True):
            ours[f"{prefix}{name}.{part}"] = third
    channels = len(ours[f"{prefix}shift.skip"])
    for name in (f"{prefix}shift.c", f"{prefix}diagonal.c"):
        rows = channels if name.endswith("shift.c") else len(ours[f"{prefix}diagonal.skip"])
        ours[name] = ours[name].unflatten(0, (-1, rows))
    return ours
