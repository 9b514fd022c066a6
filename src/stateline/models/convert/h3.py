"""H3 and its hybrids, in the formats of the official code."""

import re
from collections.abc import Collection
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stateline.errors import InputError, check_choice
from stateline.layers.mixers.heads import Rope
from stateline.models.config import ModelConfig
from stateline.models.convert.converter import Converter, Shapes
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.fields import Settings
from stateline.models.convert.parts import Change, Layer, Names, Part, groups
from stateline.models.convert.weights import count, number
from stateline.pattern import Value, format_value, runs

HeadOrder = Literal["fused", "pytorch"]
"""The two paths of the official code: ``fused`` orders the heads as the paper does, the slow
``pytorch`` path otherwise."""

_EMBEDDING = "backbone.embeddings.word_embeddings"
_POSITIONS = "backbone.embeddings.position_embeddings"
_RELEASED_HEADS = {768: 12, 1024: 16, 2048: 16, 2560: 20}
"""Heads of attention in the released models, by width."""


def released_names(found: Collection[str]) -> dict[str, str]:
    """For each tensor of an official file, its name in released files.

    Older files have another prefix. In their code, each branch normalised its sum for the next
    branch, so that a norm is named after the branch before it.
    """
    names = {}
    for name in found:
        new = re.sub(r"^s4seq\.encoder\.", "backbone.", name)
        names[name] = re.sub(r"^embedding\.", f"{_EMBEDDING}.", new)
    if "backbone.norm.weight" not in names.values():
        return names
    layers = [int(m[1]) for n in names.values() if (m := re.match(r"backbone\.layers\.(\d+)\.", n))]
    return {old: _moved_norm(new, max(layers, default=0)) for old, new in names.items()}


def _moved_norm(name: str, last: int) -> str:
    """The name that a norm of an older file has in released files."""
    if name.startswith("backbone.norm."):
        return name.replace("norm", "layers.0.norm1", 1)
    match = re.fullmatch(r"backbone\.layers\.(\d+)\.norm([12])\.(\w+)", name)
    if match is None:
        return name
    layer, part = int(match[1]), match[3]
    if match[2] == "1":
        return f"backbone.layers.{layer}.norm2.{part}"
    return f"backbone.ln_f.{part}" if layer == last else f"backbone.layers.{layer + 1}.norm1.{part}"


NAMES = Names(
    embedding=_EMBEDDING,
    mixers=("h3", "attention"),
    positions=_POSITIONS,
    norm="backbone.ln_f",
    layer="backbone.layers.{}.",
    norms=("norm1", "norm2"),
    qkv=("mixer.Wqkv",),
    out="mixer.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    inner="mixer.",
    writes_tied_head=True,
    spell=released_names,
)


def h3_config(settings: Settings) -> ModelConfig:
    """Our configuration of an official H3 model.

    Args:
        settings: Mostly read off the shapes of the tensors, since released files have no settings.
            No shape tells ``num_heads``, the number of heads of attention; its default is the
            value of the released model of the same width. Other settings: ``layer_norm_epsilon``,
            and ``head_order`` (:data:`HeadOrder`), the official path on which a model with heads
            wider than one was trained.

    Raises:
        InputError: If the number of heads is not known.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023; HazyResearch/H3.
    """
    width, names = count(settings, "d_model"), settings["mixers"]
    layers: dict[str, dict[str, Value]] = {"feed_forward": {"d_hidden": settings["d_inner"]}}
    if "h3" in names:
        layers["h3"] = settings["h3"]
    if "attention" in names:
        heads = count(settings, "num_heads", _RELEASED_HEADS.get(width))
        layers["attention"] = {"n_heads": heads, "bias": True}
        if rotary := settings["rotary_emb_dim"]:
            fraction = rotary * heads / width
            layers["attention"] |= {"position": format_value("rope", {"fraction": fraction})}
    return ModelConfig(
        runs(names),
        vocab_size=count(settings, "vocab_size"),
        d_model=width,
        norm_eps=number(settings, "layer_norm_epsilon", 1e-5),
        max_len=settings["max_len"],
        layers=layers,
    )


def _read_off(found: Shapes) -> dict[str, Any]:
    """Settings that follow from the shapes of the tensors.

    Raises:
        InputError: If a tensor is missing, or has no shape of an H3 model.
    """
    shapes = {new: found[old] for old, new in released_names(found).items()}
    mixers = [f"backbone.layers.{n}.mixer." for n in range(len(shapes))]
    mixers = [m for m in mixers if f"{m}D" in shapes or f"{m}Wqkv.weight" in shapes]
    try:
        vocab_size, width = shapes[f"{_EMBEDDING}.weight"]
        settings: dict[str, Any] = {
            "vocab_size": vocab_size,
            "d_model": width,
            "d_inner": shapes["backbone.layers.0.mlp.fc1.weight"][0],
            "max_len": shapes.get(f"{_POSITIONS}.weight", (None,))[0],
            "mixers": ["h3" if f"{mixer}D" in shapes else "attention" for mixer in mixers],
            "rotary_emb_dim": 0,
        }
        for mixer in mixers:
            if f"{mixer}D" in shapes:
                modes, filters = shapes[f"{mixer}kernel.kernel.A_imag"], shapes[f"{mixer}D"][0]
                outputs = shapes[f"{mixer}kernel.kernel.C"][0]
                n_ssm = {} if modes[0] == filters else {"n_ssm": modes[0]}
                sizes = {"d_state": 2 * modes[1], "d_head": width // filters, "n_outputs": outputs}
                settings["h3"] = sizes | n_ssm
            elif rotary := shapes.get(f"{mixer}rotary_emb.inv_freq"):
                settings["rotary_emb_dim"] = 2 * rotary[0]
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"the weights are not of an H3 model: {error!r}") from error
    return settings


def h3_settings(config: ModelConfig) -> dict[str, Any]:
    """Settings that do not follow from the tensors; the inverse of :func:`h3_config`."""
    model = groups(config, NAMES)
    attends = bool(model.numbers("attention"))
    heads = {"num_heads": model.first("attention")["n_heads"]} if attends else {}
    return {"layer_norm_epsilon": config.norm_eps, **heads}


def _parts(config: ModelConfig, settings: Settings) -> list[Part]:
    order = settings.get("head_order", "fused")
    check_choice("head_order", order, get_args(HeadOrder))
    if (config.feed_forward, config.norm, config.tie_embeddings) != ("gelu", "layer", True):
        raise InputError(
            "official H3 models have gelu feed-forwards, layer norms and tied embeddings, got "
            f"{config.pattern!r} with others"
        )
    parts = decoder_parts(config, NAMES)
    if order == "pytorch":
        heads = config.d_model // int(str(config.layers["h3"]["d_head"]))
        parts = in_order_of_pytorch(parts, heads)
    return parts + [
        Part(
            "", (f"backbone.layers.{n}.mixer.rotary_emb.inv_freq",), constant=partial(_rates, mixer)
        )
        for n, (mixer, _) in enumerate(groups(config, NAMES).blocks)
        if mixer.name == "attention" and isinstance(mixer.keywords["position"], Rope)
    ]


def in_order_of_pytorch(parts: list[Part], heads: int) -> list[Part]:
    """The tensors of H3 layers on the path ``pytorch``, whose last map orders inputs otherwise."""
    change = Change(
        lambda t: t.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1),
        lambda t: t.unflatten(1, (heads, -1)).transpose(1, 2).flatten(1),
    )
    last = "output_linear.weight"
    return [p._replace(changes=(change,)) if last in p.official[0] else p for p in parts]


def _rates(mixer: Layer) -> Tensor:
    """The angle per token of each pair of rotated entries."""
    dims, base, _ = mixer.keywords["position"].rotary(mixer.keywords["d_head"])
    return 1.0 / (base ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))


CONVERTERS = {
    "h3": Converter(
        NAMES,
        h3_config,
        h3_settings,
        recognise=lambda _, tensors: any(name.endswith("mixer.ssm_k_D") for name in tensors),
        parts=_parts,
        read_off=_read_off,
        file="model.pt",
    )
}
"""By name of the format."""
