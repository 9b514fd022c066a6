"""Which tensors of a decoder of Hugging Face are which of ours, in both directions."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.layers.mixers.feed_forward import GATED
from stateline.models.config import ModelConfig
from stateline.models.convert.to_mamba import as_stored, has_conv_bias
from stateline.models.convert.weights import some_names
from stateline.models.pattern import Item, Value, parse_pattern

BUFFERS = r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$"
"""Buffers in old files: frequencies and masks."""


class Names(NamedTuple):
    """How a family calls its tensors.

    Attributes:
        base: First part of all names but that of the output matrix; some files leave it out.
        embedding: Embedding of tokens.
        norm: Last normalisation.
        layer: First part of the names in layer number ``{}``.
        norms: Normalisations before the mixer and before the feed-forward.
        qkv: Projections of queries, keys and values, which may be one.
        out: Last projection of attention.
        up: First maps of the feed-forward, the gate before the other; they may be one.
        down: Last map of the feed-forward.
        positions: Learned positions.
        unused_positions: Rows before that of the first position.
        qk_norms: Normalisations of queries and keys.
        mamba2: First part of the names in a Mamba-2 layer.
        conv: First part of the names in a gated convolution.
        transposed: Whether linear maps are stored as (input, output).
    """

    base: str
    embedding: str
    norm: str
    layer: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    positions: str = ""
    unused_positions: int = 0
    qk_norms: tuple[str, str] = ("", "")
    mamba2: str = ""
    conv: str = ""
    transposed: bool = False


class Change(NamedTuple):
    """How the numbers of a tensor are rearranged, and its inverse."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = Change(lambda t: t, lambda t: t)
TRANSPOSED = Change(lambda t: t.mT, lambda t: t.mT)
KERNEL = Change(lambda t: t[:, 0].flip(-1), lambda t: t.flip(-1)[:, None])
"""Official kernels of convolutions begin with the oldest input."""


class Part(NamedTuple):
    """One of our tensors, and those of theirs that are its rows.

    Attributes:
        ours: Our name.
        theirs: Their names.
        rows: For several of theirs: the number of rows of each.
        change: How the numbers are rearranged.
        zeros: For a tensor that may be missing there, and is zero then: its length.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    change: Change = SAME
    zeros: int = 0


class Layer(NamedTuple):
    """One layer of a model: its kind, and all its keywords, defaults included."""

    name: str
    keywords: Mapping[str, Any]


def flat_layers(config: ModelConfig) -> list[Layer]:
    """All layers in order, each feed-forward too; InputError for wrappers."""
    return [layer for item in parse_pattern(config.pattern) for layer in _expand(item, config)]


def _expand(item: Item, config: ModelConfig) -> Iterator[Layer]:
    for _ in range(item.repeat):
        if not item.name:
            for inner in item.core:
                yield from _expand(inner, config)
            continue
        if item.name not in LAYERS or item.core:
            raise InputError(f"{item.name} has no official counterpart, got {config.pattern!r}")
        yield _layer(item.name, item.keywords, config)
        if LAYERS[item.name].wants_feed_forward and config.feed_forward != "none":
            yield _layer("feed_forward", {"activation": config.feed_forward}, config, inside=True)


def _layer(
    name: str, given: Mapping[str, Value], config: ModelConfig, *, inside: bool = False
) -> Layer:
    parameters = inspect.signature(LAYERS[name]).parameters.values()
    keywords: dict[str, Any] = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    general = config.layers.get(name, {})
    keywords |= {**given, **general} if inside else {**general, **given}
    if "n_heads" in keywords:
        keywords["n_kv_heads"] = keywords.get("n_kv_heads") or keywords["n_heads"]
        keywords["d_head"] = keywords.get("d_head") or config.d_model // keywords["n_heads"]
    if name == "feed_forward":
        gated, d_hidden = keywords["activation"] in GATED, keywords["d_hidden"]
        if d_hidden is None:
            d_hidden = 8 * round(config.d_model / 3) if gated else 4 * config.d_model
        bias = not gated if keywords["bias"] is None else keywords["bias"]
        keywords |= {"d_hidden": d_hidden, "bias": bias}
    return Layer(name, keywords)


def blocks(config: ModelConfig, mixers: Sequence[str]) -> list[tuple[Layer, Layer]]:
    """Pairs of a mixer and a feed-forward.

    Raises:
        InputError: If the model does not consist of these mixers, each with a feed-forward.
    """
    layers = flat_layers(config)
    pairs = list(zip(layers[::2], layers[1::2], strict=False))
    fits = len(layers) % 2 == 0 and config.block == "sequential" and config.norm != "none"
    fits = fits and all(m.name in mixers and f.name == "feed_forward" for m, f in pairs)
    if not fits:
        raise InputError(
            f"models of this family consist of {' or '.join(mixers)}, each followed by a "
            f"feed-forward, in sequential blocks, got {config.pattern!r}"
        )
    return pairs


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
        parts.append(Part("positions.weight", (f"{names.positions}.weight",), change=skip))
    norm_parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    parts += [Part(f"norm.{p}", (f"{names.norm}.{p}",)) for p in norm_parts]
    if not config.tie_embeddings:
        parts.append(Part("head.weight", ("lm_head.weight",)))
    make = {
        "attention": _attention,
        "sliding_attention": _sliding_attention,
        "mamba2": _mamba2,
        "gated_conv": _gated_conv,
        "feed_forward": _feed_forward,
    }
    for number, pair in enumerate(blocks(config, mixers)):
        there = names.layer.format(number)
        for branch, layer in enumerate(pair):
            here = f"stack.layers.{2 * number + branch}."
            parts += [
                Part(f"{here}norm.{p}", (f"{there}{names.norms[branch]}.{p}",)) for p in norm_parts
            ]
            parts += make[layer.name](layer.keywords, names, there, f"{here}layer.", config)
    return parts


def _linear(
    ours: str, theirs: Sequence[str], bias: bool, names: Names, rows: Sequence[int] = ()
) -> list[Part]:
    """Weight and bias of a linear map, whose rows are those of several of theirs."""
    change = TRANSPOSED if names.transposed else SAME
    sizes = tuple(rows) if len(theirs) > 1 else ()
    weight = Part(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), sizes, change)
    biases = Part(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), sizes)
    return [weight, biases] if bias else [weight]


def _attention(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    rows = [keywords[n] * keywords["d_head"] for n in ("n_heads", "n_kv_heads", "n_kv_heads")]
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
    there += names.mamba2
    inner = int(keywords["expand"] * config.d_model)
    channels = inner + 2 * keywords["n_groups"] * keywords["d_state"]
    same = {"a_log": "A_log", "skip": "D", "dt_bias": "dt_bias", "norm_weight": "norm.weight"}
    parts = [Part(here + ours, (there + theirs,)) for ours, theirs in same.items()]
    for name in ("in_proj", "out_proj"):
        parts += _linear(here + name, [there + name], keywords["bias"], names)
    parts.append(Part(f"{here}conv.kernel", (f"{there}conv1d.weight",), change=KERNEL))
    parts.append(Part(f"{here}conv.bias", (f"{there}conv1d.bias",), zeros=channels))
    return parts


def _gated_conv(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    there += names.conv
    parts = [Part(f"{here}conv.kernel", (f"{there}conv.weight",), change=KERNEL)]
    if keywords["bias"]:
        parts.append(Part(f"{here}conv.bias", (f"{there}conv.bias",)))
    for name in ("in_proj", "out_proj"):
        parts += _linear(here + name, [there + name], keywords["bias"], names)
    return parts


def _feed_forward(
    keywords: Mapping[str, Any], names: Names, there: str, here: str, _: ModelConfig
) -> list[Part]:
    up, bias = [f"{there}{name}" for name in names.up], keywords["bias"]
    parts = _linear(f"{here}in_proj", up, bias, names, [keywords["d_hidden"]] * 2)
    return parts + _linear(f"{here}out_proj", [there + names.down], bias, names)


def read_parts(
    tensors: Mapping[str, Tensor], parts: Sequence[Part], names: Names
) -> dict[str, Tensor]:
    """Our tensors from theirs.

    Raises:
        InputError: If tensors are missing or left over, or the output matrix of a model that ties
            it is not its embedding.
    """
    found = {name: t for name, t in tensors.items() if not re.search(BUFFERS, name)}
    if f"{names.embedding}.weight" not in found:
        found = {n if n.startswith("lm_head") else names.base + n: t for n, t in found.items()}
    wanted = {name for part in parts for name in part.theirs if not part.zeros}
    if missing := sorted(wanted - found.keys()):
        raise InputError(
            f"the published weights lack {some_names(missing)}: do they fit their config?"
        )
    known = {name for part in parts for name in part.theirs}
    if (head := found.get("lm_head.weight")) is not None and "lm_head.weight" not in known:
        if not head.equal(found[f"{names.embedding}.weight"]):
            raise InputError(
                "lm_head.weight must be the embedding where the configuration ties them, got "
                "another: set tie_word_embeddings to false in the settings"
            )
        del found["lm_head.weight"]
    if unexpected := sorted(found.keys() - known):
        raise InputError(
            f"the published weights hold {some_names(unexpected)}, for which the model has no "
            "place: do they fit their config?"
        )
    return {part.ours: _read(part, found) for part in parts}


def _read(part: Part, found: Mapping[str, Tensor]) -> Tensor:
    if part.zeros and part.theirs[0] not in found:
        return torch.zeros(part.zeros)
    tensors = [part.change.read(found[name]) for name in part.theirs]
    for tensor, rows, name in zip(tensors, part.rows, part.theirs, strict=False):
        if len(tensor) != rows:
            raise InputError(
                f"the published weights do not fit their config: {name!r} wants {rows} rows, got "
                f"{len(tensor)}"
            )
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def write_parts(tensors: Mapping[str, Tensor], parts: Sequence[Part]) -> dict[str, Tensor]:
    """Their tensors from ours; the inverse of :func:`read_parts`.

    Raises:
        InputError: If a tensor of the model has no place there.
    """
    if left_over := sorted(tensors.keys() - {part.ours for part in parts}):
        raise InputError(f"models of this family have no place for {some_names(left_over)}")
    dropped = not has_conv_bias(tensors)
    dtype, official = tensors["embedding.weight"].dtype, dict[str, Tensor]()
    for part in parts:
        if part.zeros and dropped:
            continue
        tensor = as_stored(part.change.write(tensors[part.ours]), dtype)
        pieces = tensor.split(list(part.rows)) if part.rows else [tensor]
        official |= dict(zip(part.theirs, pieces, strict=True))
    return official
