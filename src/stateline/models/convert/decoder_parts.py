"""The tensors of each layer of a decoder, by our names and theirs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F

from stateline.models.config import ModelConfig
from stateline.models.convert.parts import (
    KERNEL,
    SAME,
    TRANSPOSED,
    Change,
    Names,
    Part,
    blocks,
    by_head,
    single_branches,
)


def decoder_parts(config: ModelConfig, names: Names, mixers: Sequence[str]) -> list[Part]:
    """All tensors of a decoder.

    Args:
        config: What the model is made of.
        names: Names of the family.
        mixers: Layers that the family knows.

    Raises:
        InputError: If the model has layers that the family does not know.
    """
    parts = [Part("embedding.weight", (f"{names.embedding}.weight",))]
    if config.max_len:
        n = names.unused_positions
        skip = Change(lambda t: t[n:], lambda t: F.pad(t, (0, 0, n, 0)))
        parts.append(Part("positions.weight", (f"{names.positions}.weight",), changes=(skip,)))
    norm_parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    parts += [Part(f"norm.{p}", (f"{names.norm}.{p}",)) for p in norm_parts]
    if not config.tie_embeddings:
        parts.append(Part("head.weight", ("lm_head.weight",)))
    make = {
        "attention": _attention,
        "sliding_attention": _sliding_attention,
        "mamba2": _mamba2,
        "gated_conv": _gated_conv,
        "gated_delta_net": _gated_delta_net,
        "rg_lru": _rg_lru,
        "feed_forward": _feed_forward,
    }
    groups = blocks(config, mixers) if len(names.norms) > 1 else single_branches(config, mixers)
    for number, group in enumerate(groups):
        there = names.layer.format(number)
        for branch, layer in enumerate(group):
            here = f"stack.layers.{len(group) * number + branch}."
            parts += [
                Part(f"{here}norm.{p}", (f"{there}{names.norms[branch]}.{p}",)) for p in norm_parts
            ]
            parts += make[layer.name](layer.keywords, names, there, f"{here}layer.", config)
    return parts


def _linear(
    ours: str, theirs: Sequence[str], bias: bool, names: Names, rows: Sequence[int] = ()
) -> list[Part]:
    """Weight and bias of a linear map, whose rows are those of several of theirs."""
    changes = (TRANSPOSED if names.transposed else SAME,)
    sizes = tuple(rows) if len(theirs) > 1 else ()
    weight = Part(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), sizes, changes)
    biases = Part(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), sizes)
    return [weight, biases] if bias else [weight]


def _attention(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    rows = [keywords[n] * keywords["d_head"] for n in ("n_heads", "n_kv_heads", "n_kv_heads")]
    rows[0] *= 1 + keywords["gated"]
    bias, qkv = keywords["bias"], [f"{there}{name}" for name in names.qkv]
    parts = _linear(f"{here}qkv", qkv, bias in (True, "qkv"), names, rows)
    parts += _linear(f"{here}out_proj", [there + names.out], bias in (True, "out"), names)
    if keywords["qk_norm"]:
        for ours, theirs in zip(("q_norm", "k_norm"), names.qk_norms, strict=True):
            parts.append(Part(f"{here}{ours}.weight", (f"{there}{theirs}.weight",)))
    return parts


def _sliding_attention(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    rows = [keywords["n_kv_heads"] * keywords["d_head"]] * 2
    bias, (q, *kv) = keywords["bias"], [f"{there}{name}" for name in names.qkv]
    parts = _linear(f"{here}q_proj", [q], bias in (True, "qkv"), names)
    parts += _linear(f"{here}kv_proj", kv, bias in (True, "qkv"), names, rows)
    return parts + _linear(f"{here}out_proj", [there + names.out], bias in (True, "out"), names)


def _mamba2(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    there += names.inner
    inner = int(keywords["expand"] * config.d_model)
    channels = inner + 2 * keywords["n_groups"] * keywords["d_state"]
    same = {"a_log": "A_log", "skip": "D", "dt_bias": "dt_bias", "norm_weight": "norm.weight"}
    parts = [Part(here + ours, (there + theirs,)) for ours, theirs in same.items()]
    for name in ("in_proj", "out_proj"):
        parts += _linear(here + name, [there + name], keywords["bias"], names)
    parts.append(Part(f"{here}conv.kernel", (f"{there}conv1d.weight",), changes=(KERNEL,)))
    parts.append(Part(f"{here}conv.bias", (f"{there}conv1d.bias",), zeros=channels))
    return parts


def _gated_conv(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.inner
    parts = [Part(f"{here}conv.kernel", (f"{there}conv.weight",), changes=(KERNEL,))]
    if keywords["bias"]:
        parts.append(Part(f"{here}conv.bias", (f"{there}conv.bias",)))
    for name in ("in_proj", "out_proj"):
        parts += _linear(here + name, [there + name], keywords["bias"], names)
    return parts


def _gated_delta_net(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    there += names.inner
    n_heads, n_key_heads = keywords["n_heads"], keywords["n_key_heads"] or keywords["n_heads"]
    d_key = keywords["d_key"] or config.d_model // n_heads
    d_value = round(keywords["expand_v"] * d_key)
    keys, values = n_key_heads * d_key, n_heads * d_value
    same = {"a_log": "A_log", "dt_bias": "dt_bias", "norm.weight": "norm.weight"}
    parts = [Part(here + ours, (there + theirs,)) for ours, theirs in same.items()]
    inputs = tuple(f"{there}{name}.weight" for name in names.delta)
    rows: tuple[int, ...] = (2 * keys + values, values, n_heads, n_heads)
    changes: tuple[Change, ...] = (SAME,)
    if len(inputs) == 2:
        rows, shared = (2 * (keys + values), 2 * n_heads), n_heads // n_key_heads
        each = [d_key, d_key, shared * d_value, shared * d_value]
        changes = (by_head(n_key_heads, each), by_head(n_key_heads, [shared] * 2, -1))
    parts.append(Part(f"{here}in_proj.weight", inputs, rows, changes))
    parts.append(Part(f"{here}conv.kernel", (f"{there}conv1d.weight",), changes=(KERNEL,)))
    return [*parts, Part(f"{here}out_proj.weight", (f"{there}out_proj.weight",))]


def _rg_lru(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, config: ModelConfig
) -> list[Part]:
    there += names.inner
    d_inner = keywords["d_inner"] or config.d_model
    inputs = [f"{there}linear_y", f"{there}linear_x"]
    parts = _linear(f"{here}in_proj", inputs, True, names, [d_inner] * 2)
    parts += _linear(f"{here}out_proj", [f"{there}linear_out"], True, names)
    parts.append(Part(f"{here}conv.kernel", (f"{there}conv_1d.weight",), changes=(KERNEL,)))
    parts.append(Part(f"{here}conv.bias", (f"{there}conv_1d.bias",)))
    parts.append(Part(f"{here}rate", (f"{there}rg_lru.recurrent_param",)))
    for ours, theirs in (("decay", "recurrent"), ("input", "input")):
        for p in ("weight", "bias"):
            parts.append(Part(f"{here}{ours}_{p}", (f"{there}rg_lru.{theirs}_gate_{p}",)))
    return parts


def _feed_forward(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    up, bias = [f"{there}{name}" for name in names.up], keywords["bias"]
    parts = _linear(f"{here}in_proj", up, bias, names, [keywords["d_hidden"]] * 2)
    return parts + _linear(f"{here}out_proj", [there + names.down], bias, names)
