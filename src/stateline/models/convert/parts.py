"""Which tensors of a decoder of Hugging Face are which of ours, in both directions."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.layers.mixers.feed_forward import GATED, default_hidden
from stateline.models.config import ModelConfig
from stateline.models.convert.to_mamba import as_stored, has_conv_bias
from stateline.models.convert.weights import BUFFERS, some_names
from stateline.models.pattern import Item, Value, parse_pattern


class Names(NamedTuple):
    """How a family calls its tensors.

    Attributes:
        base: First part of all names but that of the output matrix; some files leave it out.
        embedding: Embedding of tokens.
        norm: Last normalisation.
        layer: First part of the names in layer number ``{}``.
        norms: Normalisations before the mixer and before the feed-forward; a single one where each
            of them is a layer of its own.
        qkv: Projections of queries, keys and values, which may be one.
        out: Last projection of attention.
        up: First maps of the feed-forward, the gate before the other; they may be one.
        down: Last map of the feed-forward.
        positions: Learned positions.
        unused_positions: Rows before that of the first position.
        qk_norms: Normalisations of queries and keys.
        inner: First part of the names in a mixer that is no attention.
        delta: Projections of the input of a delta net: four, or two whose rows are grouped by the
            heads of the keys.
        transposed: Whether linear maps are stored as (input, output).
    """

    base: str
    embedding: str
    norm: str
    layer: str
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    positions: str = ""
    unused_positions: int = 0
    qk_norms: tuple[str, str] = ("", "")
    inner: str = ""
    delta: tuple[str, ...] = ()
    transposed: bool = False


class Change(NamedTuple):
    """How the numbers of a tensor are rearranged, and its inverse."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = Change(lambda t: t, lambda t: t)
TRANSPOSED = Change(lambda t: t.mT, lambda t: t.mT)
KERNEL = Change(lambda t: t[:, 0].flip(-1), lambda t: t.flip(-1)[:, None])
"""Official kernels of convolutions begin with the oldest input."""


def by_head(heads: int, sizes: Sequence[int], order: int = 1) -> Change:
    """From rows that are grouped by head to one part after the other.

    Args:
        heads: Number of groups.
        sizes: Rows of each part in a group.
        order: -1 if our parts are in reversed order.
    """

    def read(rows: Tensor) -> Tensor:
        parts = rows.unflatten(0, (heads, -1)).split(list(sizes), dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts[::order]])

    def write(rows: Tensor) -> Tensor:
        parts = rows.split([heads * size for size in sizes[::order]])
        grouped = [part.unflatten(0, (heads, -1)) for part in parts[::order]]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    return Change(read, write)


class Part(NamedTuple):
    """One of our tensors, and those of theirs that are its rows.

    Attributes:
        ours: Our name.
        theirs: Their names.
        rows: For several of theirs: the number of rows of each.
        changes: How the numbers of theirs are rearranged: one for all, or one for each.
        zeros: For a tensor that may be missing there, and is zero then: its length.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    changes: tuple[Change, ...] = (SAME,)
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
        activation, d_hidden = keywords["activation"], keywords["d_hidden"]
        if d_hidden is None:
            d_hidden = default_hidden(config.d_model, activation)
        bias = activation not in GATED if keywords["bias"] is None else keywords["bias"]
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


def single_branches(config: ModelConfig, layers: Sequence[str]) -> list[tuple[Layer]]:
    """The layers of a model in which a feed-forward is one of them, as groups of one.

    Raises:
        InputError: If the model does not consist of these layers.
    """
    found = flat_layers(config)
    fits = config.block == "sequential" and config.norm != "none"
    if not fits or not {layer.name for layer in found} <= set(layers):
        raise InputError(
            f"models of this family consist of {' or '.join(layers)} in sequential blocks, got "
            f"{config.pattern!r}"
        )
    return [(layer,) for layer in found]


def first_keywords(groups: Sequence[tuple[Layer, ...]], name: str) -> Mapping[str, Any]:
    """Keywords of the first layer of a kind.

    Raises:
        InputError: If there is none.
    """
    for layer in (layer for group in groups for layer in group):
        if layer.name == name:
            return layer.keywords
    raise InputError(f"models of this family have at least one layer {name}, got none")


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
    for name, rows in zip(part.theirs, part.rows, strict=False):
        if (got := found[name].shape[:1]) != (rows,):
            raise InputError(
                f"the published weights do not fit their config: {name!r} wants {rows} rows, got "
                f"{'none' if not got else got[0]}"
            )
    changes = zip(part.theirs, cycle(part.changes), strict=False)
    try:
        tensors = [change.read(found[name]) for name, change in changes]
    except (LookupError, RuntimeError) as error:
        raise InputError(
            f"the published weights do not fit their config: {part.theirs[0]!r} has the shape "
            f"{tuple(found[part.theirs[0]].shape)}"
        ) from error
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
        tensor = as_stored(tensors[part.ours], dtype)
        pieces = tensor.split(list(part.rows)) if part.rows else [tensor]
        for name, piece, change in zip(part.theirs, pieces, cycle(part.changes), strict=False):
            official[name] = change.write(piece)
    return official
