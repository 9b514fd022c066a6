"""Which tensors of a published model are which of ours, in both directions."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import LAYERS, WRAPPERS, Stack
from stateline.layers.base import LOW_PRECISION
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import check_names, some_names
from stateline.models.factory import meta_model

BUFFERS = (
    r"\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$|_attn_buf$|^model\.visual\.|^mtp\."
)
"""Tensors that no model needs: frequencies and masks in old files, parts that read images, and
parts that predict several tokens at once."""


class Experts(NamedTuple):
    """The names of a mixture of experts.

    Attributes:
        router: The map to the scores.
        up: First maps of an expert, the gate before the other; they may be one. Its number is
            ``{}``; without ``{}``, one tensor holds all experts.
        down: Last map of an expert.
        always: First maps and last map of the expert that all positions use.
        gate: The map whose sigmoid multiplies the output of that expert.
        correction: Constants that are added to the scores to choose experts.
        whole: In other files, the tensors that hold the first maps and the last maps of all
            experts.
    """

    router: str
    up: tuple[str, ...]
    down: str
    always: tuple[tuple[str, ...], str] = ((), "")
    gate: str = ""
    correction: str = ""
    whole: tuple[str, str] = ("", "")


class Names(NamedTuple):
    """The names of a format's tensors, and the layers that the format supports.

    Attributes:
        embedding: Embedding of tokens.
        mixers: Our names of the layers that it supports, besides ``ends``.
        ends: Our names of the layers that may follow the mixer in blocks of two.
        branches: Our names of the layers in a mixer that is a wrapper.
        wrapper: Our name of the wrapper around all layers, if there is one.
        base: What all names but that of the output matrix begin with, as they stand here; some
            files leave it out.
        embedding_norm: Normalisation of the embeddings.
        norm: Last normalisation.
        layer: Prefix of the names in layer number ``{}``.
        norms: Normalisations before the mixer and before the feed-forward; a single one if mixers
            and feed-forwards are separate layers.
        norms_after: The same for norms that follow the layers, of which ``sandwich`` has both.
        qkv: Projections of queries, keys and values, which may be one.
        by_head: Whether rows of a joint projection are grouped by head.
        out: Last projection of attention.
        up: First maps of the feed-forward, the gate before the other; they may be one.
        down: Last map of the feed-forward.
        experts: Names of a mixture of experts, if the format has such feed-forwards.
        positions: Learned positions.
        unused_positions: Number of rows before the row of the first position.
        qk_norms: Normalisations of queries and keys.
        inner: Prefix of the names in a mixer other than attention.
        delta: Projections of the input of a delta net: six, four, or two whose rows are grouped by
            the heads of the keys; six are followed by three convolutions.
        transposed: Whether linear maps are stored as (input, output).
        blocks: How a mixer and its feed-forward may be joined: words of ``ModelConfig.block``.
        head: Output matrix.
        writes_tied_head: Whether files hold the output matrix although it is the embedding.
        spell: A function from all names in a file, also of another version, to the names here.
    """

    embedding: str
    mixers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ("feed_forward",)
    branches: tuple[str, ...] = ()
    wrapper: str = ""
    base: str = ""
    embedding_norm: str = ""
    norm: str = ""
    layer: str = ""
    norms: tuple[str, ...] = ()
    norms_after: tuple[str, ...] = ()
    qkv: tuple[str, ...] = ()
    by_head: bool = False
    out: str = ""
    up: tuple[str, ...] = ()
    down: str = ""
    experts: Experts | None = None
    positions: str = ""
    unused_positions: int = 0
    qk_norms: tuple[str, str] = ("", "")
    inner: str = ""
    delta: tuple[str, ...] = ()
    transposed: bool = False
    blocks: tuple[str, ...] = ("sequential",)
    head: str = "lm_head"
    writes_tied_head: bool = False
    spell: Callable[[Collection[str]], Mapping[str, str]] = lambda found: dict(
        zip(found, found, strict=True)
    )


def renamed(old: str, new: str) -> Callable[[Collection[str]], Mapping[str, str]]:
    """For :attr:`Names.spell`: files of some versions have another name for one tensor."""
    return lambda found: {name: new if name == old else name for name in found}


class Change(NamedTuple):
    """A rearrangement of the entries of a tensor, and its inverse."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = Change(lambda t: t, lambda t: t)
TRANSPOSED = Change(lambda t: t.mT, lambda t: t.mT)
KERNEL = Change(lambda t: t[:, 0].flip(-1), lambda t: t.flip(-1)[:, None])
"""Official kernels of convolutions begin with the oldest input."""


def by_head(heads: int, sizes: Sequence[int], order: int = 1) -> Change:
    """Rearrange rows from groups by head to one part after the other.

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
    """One of our tensors, and the official tensors that are its rows.

    Attributes:
        ours: Our name; empty for official tensors that our model does not need.
        official: The official names.
        rows: For several official tensors: the number of rows of each; by default, the sizes in the
            file; when written, equal parts.
        changes: How the entries of official tensors are rearranged: one for all, or one for each.
        joined: How the entries of the joined rows are rearranged.
        whole: In files that have none of ``official``: the one official tensor that replaces them.
        anywhere: Whether files may cut the joined rows in other places.
        constant: Makes the value of a tensor that only one side has: ours, or an official one.
        within: Index of our entries in an official tensor that holds several of our tensors.
    """

    ours: str
    official: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    changes: tuple[Change, ...] = (SAME,)
    joined: Change = SAME
    whole: str = ""
    anywhere: bool = False
    constant: Callable[[], Tensor] | None = None
    within: Any = ...


class Place(NamedTuple):
    """A layer of a model, or another place of tensors.

    Attributes:
        there: Prefix of the official names of its tensors.
        here: Prefix of our names.
        keywords: All keywords of the layer.
        names: Names of the format.
    """

    there: str = ""
    here: str = ""
    keywords: Mapping[str, Any] = {}
    names: Names = Names("")

    def same(self, pairs: str, change: Change = SAME) -> list[Part]:
        """Tensors that differ in their names, and by a change if it is given.

        Args:
            pairs: OURS:THEIRS, separated by spaces; NAME if both are equal; OURS:THEIRS+THEIRS if
                equal parts of our rows are official tensors. NAME.* is the weight and the bias.
            change: Of each official tensor.
        """
        each = (
            pair.replace("*", end).partition(":")
            for pair in pairs.split()
            for end in (("weight", "bias") if "*" in pair else ("",))
        )
        return [self.part(o, (t or o).split("+"), changes=(change,)) for o, _, t in each]

    def part(
        self, ours: str, official: Sequence[str], rows: Sequence[int] = (), **rest: Any
    ) -> Part:
        """A tensor whose rows are official tensors; ``rest`` are the other fields of the part."""
        names = tuple(self.there + name for name in official)
        return Part(self.here + ours, names, tuple(rows), **rest)

    def linear(
        self,
        ours: str,
        official: Sequence[str],
        bias: bool,
        rows: Sequence[int] = (),
        change: Change = SAME,
    ) -> list[Part]:
        """Weight and bias of a linear map, which may join the rows of several official maps."""
        sizes = rows if len(official) > 1 else ()
        changes = {"weight": TRANSPOSED if self.names.transposed else change, "bias": change}
        return [
            self.part(
                f"{ours}.{end}", [f"{n}.{end}" for n in official], sizes, changes=(changes[end],)
            )
            for end in ("weight", "bias")[: 1 + bool(bias)]
        ]

    def ends(self) -> list[Part]:
        """The first and the last map, which have the same names."""
        end = "*" if self.keywords["bias"] else "weight"
        return self.same(f"in_proj.{end} out_proj.{end}")

    def kernel(self, there: str, bias: bool = False) -> list[Part]:
        """A short convolution."""
        parts = self.same(f"conv.kernel:{there}.weight", KERNEL)
        return parts + (self.same(f"conv.bias:{there}.bias") if bias else [])


class Layer(NamedTuple):
    """One layer of a model.

    Attributes:
        name: Its kind.
        keywords: Its keywords, where derived values stand for defaults, and other attributes.
        path: Prefix of our names of its tensors.
        parts: For each layer of the core of a wrapper, the layers in it.
    """

    name: str
    keywords: Mapping[str, Any]
    path: str
    parts: tuple[tuple["Layer", ...], ...] = ()


def model_layers(config: ModelConfig) -> list[Layer]:
    """The layers of a model in order, each feed-forward too; InputError if it cannot be built."""
    kinds = {made: name for table in (LAYERS, WRAPPERS) for name, made in table.items()}
    return list(_layers(meta_model(config).stack, "stack.", kinds))


def _layers(module: nn.Module, path: str, kinds: Mapping[type, str]) -> Iterator[Layer]:
    """The layers in a module."""
    if type(module) not in kinds:
        for name, child in module.named_children():
            yield from _layers(child, f"{path}{name}.", kinds)
        return
    children = module.named_children()
    keywords = {name: len(child) for name, child in children if isinstance(child, nn.ModuleList)}
    keywords |= {**vars(module.settings), **vars(module)}
    core = getattr(module, "core", None)
    parts = (
        tuple(_layers(link, f"{path}core.layers.{i}.", kinds))
        for i, link in enumerate(core.links if isinstance(core, Stack) else ())
    )
    yield Layer(kinds[type(module)], keywords, path, tuple(parts))


def unwrapped(layers: Iterable[Layer]) -> list[Layer]:
    """The layers, where a wrapper stands for those in it."""
    return [one for layer in layers for part in layer.parts or ((layer,),) for one in part]


class Written(NamedTuple):
    """A model of ours in the blocks of a format.

    Attributes:
        config: Its configuration.
        layers: Its layers.
        blocks: The same by blocks, without the wrapper of the format.
    """

    config: ModelConfig
    layers: Sequence[Layer]
    blocks: Sequence[tuple[Layer, ...]]

    def first(self, *names: str) -> Mapping[str, Any]:
        """Keywords of the first layer of some kinds; InputError if there is none."""
        for layer in (*self.layers, *unwrapped(self.layers)):
            if layer.name in names:
                return layer.keywords
        raise InputError(f"models of this family have at least one layer {names[0]}, got none")

    def numbers(self, name: str) -> list[int]:
        """Which blocks have a layer of a kind."""
        return [i for i, block in enumerate(self.blocks) if name in {layer.name for layer in block}]


def inner_width(keywords: Mapping[str, Any], config: ModelConfig) -> int:
    """Number of inner channels of a Mamba or a Mamba-2."""
    return int(keywords["expand"] * config.d_model)


def groups(config: ModelConfig, names: Names) -> Written:
    """The layers by blocks of the format: a mixer and its feed-forward, or one; else InputError."""
    layers, size = model_layers(config), len(names.norms)
    wrapped = [layer.name for layer in layers] == [names.wrapper]
    found = unwrapped(layers) if wrapped else layers
    blocks = [tuple(found[at : at + size]) for at in range(0, len(found), size)]
    ends = {*names.ends, "moe"} if names.experts else {*names.ends}
    fits = config.block in names.blocks and config.norm != "none" and not config.head_bias
    fits = fits and bool(config.norm_after) <= bool(names.norms_after)
    fits = fits and wrapped == bool(names.wrapper)
    fits = fits and all(
        mixer.name in names.mixers
        and all(len(part) == 1 and part[0].name in names.branches for part in mixer.parts)
        and len(rest) == size - 1
        and all(layer.name in ends for layer in rest)
        for mixer, *rest in blocks
    )
    if not fits:
        followed = f", each followed by a {names.ends[0]}," if size > 1 else ""
        inside = f" in {names.wrapper}(...)" if names.wrapper else ""
        branches = f"({', '.join(names.branches)})" if names.branches else ""
        mixers = " or ".join(names.mixers) + branches
        raise InputError(
            f"models of this family consist of {mixers}{followed}{inside} in "
            f"{' or '.join(names.blocks)} blocks with norms, got {config.pattern!r}"
        )
    return Written(config, layers, blocks)


def matched(found: Collection[str], parts: Sequence[Part], names: Names) -> dict[str, str]:
    """The name in a file of each official tensor; InputError if any is missing or left over.

    What stands before the name of the embedding is removed if all names begin with it: DDP saves
    ``module.`` there, and ``torch.compile`` saves ``_orig_mod.``.
    """
    embedding = f"{names.embedding}.weight"
    ends = [name for name in found if name.endswith(embedding)]
    before = min(ends, key=len, default=embedding).removesuffix(embedding)
    wrapped = all(name.startswith(before) for name in found)
    inside = {name.removeprefix(before) if wrapped else name: name for name in found}
    spelled = names.spell([name for name in inside if not re.search(BUFFERS, name)])
    if embedding not in spelled.values():
        spelled = {n: t if t.startswith(names.head) else names.base + t for n, t in spelled.items()}
    files = {there: inside[name] for name, there in spelled.items()}
    parts = [_as_in(files, part) for part in parts]
    needed = {name for part in parts if part.ours for name in part.official}
    known = {name for part in parts for name in part.official} | {f"{names.head}.weight"}
    check_names(files, needed, known)
    return files


def _as_in(files: Collection[str], part: Part) -> Part:
    """A part, with the official names that the file uses."""
    return Part(part.ours, (part.whole,)) if part.whole in files else part


def read_parts(
    tensors: Mapping[str, Tensor],
    parts: Sequence[Part],
    names: Names,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors from official ones, one at a time, each in memory of its own.

    Args:
        tensors: Official tensors; one at a time is asked for.
        parts: The tensors of the model.
        names: Names of the format.
        dtype: Precision of our tensors; by default as they were saved.

    Raises:
        InputError: If tensors are missing or left over, do not fit, or the output matrix of a model
            that ties it is not its embedding.
    """
    files = matched(tensors, parts, names)
    parts = [_as_in(files, part) for part in parts]
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    tied = head in files and not any(head in part.official for part in parts)
    if tied and not tensors[files[head]].equal(tensors[files[embedding]]):
        raise InputError(
            f"{head} must be the embedding where the configuration ties them, got another: set "
            "tie_word_embeddings (or tie_embeddings) to false in the settings"
        )
    return (
        (part.ours, _read(part, (_checked(n, tensors[files[n]]) for n in part.official), dtype))
        for part in parts
        if part.ours
    )


def _checked(name: str, tensor: Tensor) -> Tensor:
    """Raise InputError if a tensor is quantised or has values that are not finite."""
    if tensor.dtype not in (torch.float64, torch.float32, *LOW_PRECISION):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(
            f"{name!r} is stored as {kind}: quantised weights are not supported, get those in "
            "bfloat16"
        )
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise InputError(f"{name!r} holds values that are not finite: get the weights again")
    return tensor


def _read(part: Part, found: Iterable[Tensor], dtype: torch.dtype | None) -> Tensor:
    """One of our tensors, in memory of its own; official tensors are read one at a time."""
    names = iter(part.official)
    name, shape = "", torch.Size()

    def pieces() -> Iterator[Tensor]:
        nonlocal name, shape
        rows = repeat(None) if part.anywhere or not part.rows else part.rows
        for tensor, wanted, change in zip(found, rows, cycle(part.changes), strict=False):
            name, shape = next(names), tensor.shape
            if wanted not in (None, *shape[:1]):
                raise InputError(
                    f"the published weights do not fit their config: {name!r} wants {wanted} rows, "
                    f"got {shape[0] if shape else 'none'}"
                )
            yield change.read(tensor[part.within])

    if part.constant is not None:
        return part.constant()
    try:
        joined = _filled(pieces(), sum(part.rows), dtype) if part.rows else _cat(pieces(), dtype)
        return part.joined.read(joined)
    except (LookupError, RuntimeError) as error:
        raise InputError(
            f"the published weights do not fit their config: {name!r} has the shape {tuple(shape)}"
        ) from error


def _cat(pieces: Iterable[Tensor], dtype: torch.dtype | None) -> Tensor:
    """One copy of a tensor, or of several one after the other."""
    first, *others = pieces
    joined = torch.cat([first, *others]) if others else first
    return joined.to(dtype or joined.dtype, copy=True, memory_format=torch.contiguous_format)


def _filled(pieces: Iterator[Tensor], rows: int, dtype: torch.dtype | None) -> Tensor:
    """Like :func:`_cat`, for known rows, with one piece at a time in memory."""
    first = next(pieces)
    filled = first.new_empty((rows, *first.shape[1:]), dtype=dtype or first.dtype)
    at = 0
    for piece in chain([first], pieces):
        if dtype is None:
            filled = filled.to(torch.promote_types(filled.dtype, piece.dtype))
        filled[at : at + len(piece)].view_as(piece).copy_(piece)
        at += len(piece)
    return filled.view(at, *first.shape[1:])


def write_parts(
    tensors: Mapping[str, Tensor], parts: Sequence[Part], names: Names
) -> Iterator[tuple[str, Tensor]]:
    """The inverse of :func:`read_parts`; InputError if a tensor of the model has no place there."""
    if left_over := sorted(tensors.keys() - {part.ours for part in parts}):
        raise InputError(f"models of this family have no place for {some_names(left_over)}")
    return _write(tensors, parts, names)


def _write(
    tensors: Mapping[str, Tensor], parts: Sequence[Part], names: Names
) -> Iterator[tuple[str, Tensor]]:
    dtype = tensors["embedding.weight"].dtype
    for part in parts:
        if part.ours:
            yield from official_pieces(part, as_stored(tensors[part.ours], dtype))
        elif part.constant is not None:
            yield part.official[0], part.constant().to(dtype)
    if names.writes_tied_head and "head.weight" not in tensors:
        yield f"{names.head}.weight", tensors["embedding.weight"]


def official_pieces(part: Part, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The official tensors of a part, from ours."""
    tensor, n = part.joined.write(tensor), len(part.official)
    pieces = tensor.split(list(part.rows)) if part.rows else tensor.chunk(n) if n > 1 else [tensor]
    for name, piece, change in zip(part.official, pieces, cycle(part.changes), strict=False):
        yield name, change.write(piece)


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast back to the model's half precision if this is exact; reading may have raised it."""
    lower = tensor.to(dtype)
    exact = dtype in LOW_PRECISION and bool(lower.to(tensor.dtype).equal(tensor))
    return lower if exact else tensor
