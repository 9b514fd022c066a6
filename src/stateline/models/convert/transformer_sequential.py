"""The models of "Staircase Attention", from the weights of its official code."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import BUFFERS, assemble, count, rename
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import Value

Kind = Literal["transformer_xl", "ladder", "staircase", "cached_staircase", "feedback"]


def load_transformer_sequential(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    kind: Kind,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Read one of the models of ``facebookresearch/transformer-sequential``.

    Differs from the official models as our layers do: the first tokens do not attend to zeros
    before them, and a staircase carries the inputs of its layers, not their outputs. Official
    layers share one table of position keys; here each layer has a copy.

    Args:
        tensors: Its state dict, by official names.
        settings: Its arguments (``nlayers``, ``hid_sz``, ...); for ``ladder`` also ``order``, the
            order in which layers run; for ``cached_staircase`` also ``M`` and ``global_cache``.
        kind: Which of the models.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If tensors are missing, left over or of another shape, or the arguments ask for
            what is not there.

    References:
        Ju et al., "Staircase Attention for Recurrent Processing of Sequences", 2021.
    """
    config = transformer_sequential_config(settings, kind)
    weights = transformer_sequential_weights(tensors, settings, kind)
    return assemble(config, weights, device=device)


def transformer_sequential_config(settings: Mapping[str, Any], kind: Kind) -> ModelConfig:
    """Our configuration of such a model; see :func:`load_transformer_sequential`."""
    if kind not in get_args(Kind):
        raise unknown_name("kind", kind, get_args(Kind))
    attention: dict[str, Value] = {
        "n_heads": count(settings, "nheads"),
        "window": count(settings, "attn_lim"),
        "position": "relative",
        # A layer with its own memory does not attend to the current position.
        "includes_self": kind in ("staircase", "cached_staircase"),
    }
    return ModelConfig(
        _pattern(settings, kind),
        vocab_size=count(settings, "vocab_sz"),
        d_model=count(settings, "hid_sz"),
        block="sequential" if settings.get("pre_norm") else "post_norm",
        feed_forward="relu",
        tie_embeddings=False,
        head_bias=True,
        layers={
            "sliding_attention": attention,
            "feed_forward": {"d_hidden": count(settings, "inner_hid_sz")},
        },
    )


def transformer_sequential_weights(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], kind: Kind
) -> dict[str, Tensor]:
    """Its tensors by our names; see :func:`load_transformer_sequential`."""
    prefix = "transformer." if kind in ("staircase", "cached_staircase") else ""
    places = _places(settings, kind)
    names = {"in_emb.weight": "embedding.weight"}
    names |= {f"out.out_emb.{part}": f"head.{part}" for part in ("weight", "bias")}
    if settings.get("pre_norm"):
        names |= {f"out_norm.{part}": f"norm.{part}" for part in ("weight", "bias")}
    for layer, (attention, feed_forward) in enumerate(places):
        official = f"{prefix}layers.{layer}"
        names[f"{official}.attn.attn.key_pe"] = f"{attention}.layer.position_keys"
        for theirs, ours in (("query", "q"), ("key", "k"), ("val", "v"), ("out", "out")):
            names[f"{official}.attn.proj_{theirs}.weight"] = f"{attention}.layer.{ours}_proj.weight"
        for part in ("weight", "bias"):
            names[f"{official}.norm1.{part}"] = f"{attention}.norm.{part}"
            names[f"{official}.norm2.{part}"] = f"{feed_forward}.norm.{part}"
            names[f"{official}.ff.fc1.{part}"] = f"{feed_forward}.layer.in_proj.{part}"
            names[f"{official}.ff.fc2.{part}"] = f"{feed_forward}.layer.out_proj.{part}"
    if kind == "feedback":
        names["single_memory_attn_params"] = "stack.layers.0.mixture"
    weights = rename(tensors, names, ignored=BUFFERS)
    if kind == "feedback":
        weights["stack.layers.0.mixture"] = weights["stack.layers.0.mixture"][0]
    for layer, (attention, _) in enumerate(places):
        table = f"{attention}.layer.position_keys"
        weights[table] = weights[table][0].T.flip(0)  # officially, the largest distance comes first
        key, value = (weights.pop(f"{attention}.layer.{part}_proj.weight") for part in "kv")
        if not (layer and settings.get("share_proj_kv")):
            weights[f"{attention}.layer.kv_proj.weight"] = torch.cat([key, value])
    return weights


def _pattern(settings: Mapping[str, Any], kind: Kind) -> str:
    n_layers = count(settings, "nlayers")
    core = f"sliding_attention*{n_layers}"
    if kind == "transformer_xl":
        return core
    if kind == "ladder":
        passes = len(settings["order"]) // n_layers
        if _repeats_layers(settings):
            return f"ladder(sliding_attention, passes={passes})*{n_layers}"
        return f"ladder({core}, passes={passes})"
    if kind == "feedback":
        shared = str(bool(settings.get("share_proj_kv"))).lower()
        return f"feedback({core}, window={count(settings, 'attn_lim')}, shared={shared})"
    chunk_len = count(settings, "fix_staircase_size_forward")
    steps = count(settings, "staircase_size") // chunk_len
    if kind == "staircase":
        return f"staircase({core}, passes={steps}, chunk_len={chunk_len})"
    seen = "none" if settings.get("global_cache") else steps
    passes = count(settings, "M")
    return f"cached_staircase({core}, passes={passes}, chunk_len={chunk_len}, steps={seen})"


def _repeats_layers(settings: Mapping[str, Any]) -> bool:
    """True if the order of a ladder is AABB, False if it is ABAB."""
    order, n_layers = list(settings["order"]), count(settings, "nlayers")
    passes = max(1, len(order) // n_layers)
    if order == list(range(n_layers)) * passes:
        return False
    if order == [layer for layer in range(n_layers) for _ in range(passes)]:
        return True
    raise InputError(f"a ladder's order must be ABAB or AABB, got {order}")


def _places(settings: Mapping[str, Any], kind: Kind) -> list[tuple[str, str]]:
    """Our prefixes of the attention and the feed-forward of each layer."""
    n_layers = count(settings, "nlayers")
    if kind == "ladder" and _repeats_layers(settings):
        cores = [f"stack.layers.{layer}.core.layers" for layer in range(n_layers)]
        return [(f"{core}.0", f"{core}.1") for core in cores]
    core = "stack.layers" if kind == "transformer_xl" else "stack.layers.0.core.layers"
    return [(f"{core}.{2 * layer}", f"{core}.{2 * layer + 1}") for layer in range(n_layers)]
