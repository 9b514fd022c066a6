"""Functions on the state of any layer, which is a tree of batch-first tensors."""

import dataclasses
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.files import write_atomically
from stateline.ops.kernel_op import values_at_hand
from stateline.settings import Choice, Settings, check_kind, check_unwrapped, uncompiled

State = Any
"""A tensor with one row per sequence, or a (named) tuple of states.

A named tuple may have static methods: ``accumulators()``, which
:func:`stateline.layers.accumulates` makes, names the fields whose precision :func:`to` does not
change, ``storable()`` names further fields that :func:`stateline.layers.stored_state.stored`
rounds, ``cat(states)`` joins states whose tensors differ in shape, ``trim(state)`` drops free
slots, and ``fit(state, like)`` gives a state as much room as another where the free slots are not
the last ones.
"""

Fingerprint = Mapping[str, str]
"""What :func:`fingerprint` returns."""

_FORMAT = "stateline-state-3"

_MOST = 1 << 53
"""No state has read so many tokens."""


class ForeignState(InputError):
    """A state in a file is one of another model."""


def leaves_of(state: State) -> list[Tensor]:
    """All tensors of a state, in order; much faster than PyTorch's function for any tree.

    Raises:
        InputError: If it is no state.
    """
    if isinstance(state, Tensor):
        return [state]
    if not isinstance(state, tuple):
        raise InputError(
            f"a state is a tensor or a (named) tuple of states, got a {type(state).__name__}: give "
            "one that a layer returned"
        )
    return [leaf for part in state for leaf in leaves_of(part)]


def select_rows(state: State, rows: Sequence[int] | Tensor) -> State:
    """Copy some rows, in the given order; taking a row more than once forks it.

    Raises:
        InputError: If the rows are no list, or one of them is not there. (Row numbers that are on
            an accelerator are not read.)

    Example:
        >>> select_rows((torch.tensor([1, 2, 3]),), [2, 2])
        (tensor([3, 3]),)
    """
    leaves = leaves_of(state)
    try:
        numbers = rows if isinstance(rows, Tensor | int) else list(rows)
        index = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        index = torch.tensor(0.5)  # refused below
    is_mask, count = index.dtype == torch.bool, len(leaves[0]) if leaves else index.numel()
    fits = index.ndim == 1 and not (index.is_floating_point() and index.numel())
    if fits and is_mask:
        fits = len(index) == count
    elif fits and values_at_hand(index):
        fits = not leaves or bool(((-count <= index) & (index < count)).all())
    if not fits:
        given = rows.tolist() if isinstance(rows, Tensor) else rows
        raise InputError(
            f"rows must be a list of numbers below {count}, the rows of the state, got {given}: "
            "give such as [0]"
        )
    index = index if is_mask else index.long()
    return pytree.tree_map(lambda t: t[index.to(t.device)], state)


def copied(state: State) -> State:
    """Copy that shares no memory with the state."""
    return pytree.tree_map(torch.clone, state)


def cat_states(states: Sequence[State], *, layer: Any = None, capacity: int = 0) -> State:
    """Join states of one layer into one batch; rows keep the given order.

    The states may have read different numbers of tokens, so a server can add rows to a running
    batch.

    Args:
        states: At least one state.
        layer: The layer or model of the states; needed with ``capacity``.
        capacity: Number of tokens, counted from the first, for which every row of the result gets
            room, so that ``step_`` can continue in place. With zero, all rows get as much room as
            the state with the most room.

    Returns:
        The joined state, a copy.

    Raises:
        InputError: If there is no state, or a capacity without a layer; if the states are of
            different layers or on different devices.
    """
    if not isinstance(states, Sequence) or hasattr(states, "_fields"):
        raise InputError(f"cat_states needs a list of states, got a {type(states).__name__}")
    if not states:
        raise InputError("cat_states needs at least one state, got none")
    for state in states:
        leaves_of(state)  # refuses what is no state
    if capacity:
        if layer is None:
            raise InputError(
                "cat_states needs the layer of the states to make room: pass layer=..."
            )
        rows = sum(len(leaves_of(state)[0]) for state in states if leaves_of(state))
        roomy = layer.init_state(1, capacity=capacity)
        return select_rows(cat_states([*states, roomy]), range(rows))
    first = form(states[0])
    if other := next((n for n, state in enumerate(states) if form(state) != first), None):
        raise InputError(
            f"cat_states needs states of one layer on one device, but state {other} has other "
            "parts or sizes than state 0, or is elsewhere: make both with the same layer (whose "
            "tuple needs a static method cat, if its tensors grow)"
        )
    return _cat(states)


def form(state: State, slots: bool = False) -> Any:
    """What states of one layer have in common: types, devices, and shapes without rows and slots.

    With ``slots``, as inside of a tuple that joins tensors of different shapes, the axis after the
    rows may have any size.
    """
    if isinstance(state, Tensor):
        return state.device, state.ndim, state.shape[1 + slots :]
    slots = slots or hasattr(state, "cat")
    return type(state), [form(part, slots) for part in state]


def _cat(states: Sequence[State]) -> State:
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if hasattr(first, "cat"):
        return first.cat(states)
    return _like(first, [_cat(parts) for parts in zip(*states, strict=True)])


def replace_rows(state: State, rows: Tensor, other: State) -> State:
    """Replace the masked rows of a state by the same rows of another state of the layer.

    Example:
        >>> replace_rows(torch.tensor([1, 2]), torch.tensor([False, True]), torch.tensor([8, 9]))
        tensor([1, 9])
    """
    kept, replaced = (~rows).nonzero().flatten(), rows.nonzero().flatten()
    joined = cat_states([select_rows(state, kept), select_rows(other, replaced)])
    return select_rows(joined, torch.cat([kept, replaced]).argsort())


def overwrite_rows(state: State, rows: Tensor, other: State) -> None:
    """Overwrite the masked rows of a state by the same rows of another state of the layer.

    If one state has more free slots than the other, only the common part is written; the caller
    guarantees that all slots in use lie there.
    """
    if isinstance(state, Tensor):
        common = tuple(slice(min(sizes)) for sizes in zip(state.shape, other.shape, strict=True))
        mask = rows.view(-1, *[1] * (state.ndim - 1))
        state[common].copy_(torch.where(mask, other[common], state[common]))
        return
    fitted = state.fit(other, state) if hasattr(state, "fit") else other
    for old, new in zip(state, fitted, strict=True):
        overwrite_rows(old, rows, new)


def trim(state: State) -> State:
    """Drop the free slots that ``capacity`` reserved; the result shares memory with the state."""
    leaves_of(state)  # refuses what is no state
    if isinstance(state, Tensor):
        return state
    if hasattr(state, "trim"):
        return state.trim(state)
    return _like(state, [trim(part) for part in state])


def detach(state: State) -> State:
    """Detach a state from the graph that computed it."""
    leaves_of(state)  # refuses what is no state
    return pytree.tree_map(lambda t: t.detach(), state)


def to(
    state: State, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> State:
    """Move a state to a device or cast it.

    The dtype applies to keys, values and past inputs. Positions stay integers, and accumulators
    keep their precision.

    Raises:
        InputError: If it is no state, if there is no such device, or if the dtype is not one of
            floating-point numbers.
    """
    leaves_of(state)  # refuses what is no state
    if device is not None and not isinstance(device, torch.device):
        device = resolve_device(str(device))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype must be of floats, such as torch.bfloat16, got {dtype!r}")

    def move(leaf: Tensor, keeps_dtype: bool) -> Tensor:
        fixed = keeps_dtype or not leaf.is_floating_point()
        return leaf.to(device=device, dtype=leaf.dtype if fixed else dtype)

    return map_marked(state, accumulators, move)


def map_marked(
    state: State,
    fields: Callable[[State], tuple[str, ...]],
    change: Callable[[Tensor, bool], Tensor],
    marked: bool = False,
) -> State:
    """Change every tensor of a state, given whether it is in a marked field of its named tuple."""
    if isinstance(state, Tensor):
        return change(state, marked)
    names, wanted = getattr(state, "_fields", range(len(state))), fields(state)
    parts = zip(names, state, strict=True)
    return _like(state, [map_marked(part, fields, change, name in wanted) for name, part in parts])


def nbytes(state: State) -> int:
    """Number of bytes in the tensors of a state.

    Example:
        >>> nbytes((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
        40
    """
    return sum(t.numel() * t.element_size() for t in leaves_of(state))


def accumulators(part: State) -> tuple[str, ...]:
    """Fields of one (named) tuple that accumulate rounding errors, so they stay float32."""
    return getattr(part, "accumulators", tuple)()


def save_state(
    path: str | Path, state: State, layer: nn.Module, *, known: Fingerprint | None = None
) -> None:
    """Write the state of a layer or model to a safetensors file, with its hash and a fingerprint.

    The file is replaced atomically. ``known`` is the fingerprint of the layer, if it was computed
    before: a server saves many states of the same weights.

    Raises:
        InputError: If the file cannot be written, if the state has parts that are no tensors, or
            if the layer is no layer.
    """
    _check_arguments(path, layer)
    leaves_of(state)  # refuses what is no state
    tensors = {name: leaf.detach().contiguous().clone() for name, leaf in named_leaves(state)}
    metadata = {"format": _FORMAT, "content": _digest(state), **(known or fingerprint(layer))}
    write_atomically(Path(path), lambda file: save_file(tensors, file, metadata=metadata))


def load_state(
    path: str | Path,
    layer: Any,
    *,
    force: bool = False,
    template: Callable[[int], State] | None = None,
    known: Fingerprint | None = None,
) -> State:
    """Read a state written by :func:`save_state`, onto the layer's device.

    Args:
        path: File to read.
        layer: The layer or model that will continue from the state.
        force: Accept a state that was computed with other weights or another configuration.
        template: Function from a capacity to a one-row state of the kind that was saved; by default
            ``layer.init_state``.
        known: The fingerprint of the layer, if it was computed before.

    Returns:
        The state, ready for ``layer.forward_chunk``.

    Raises:
        InputError: If the file is missing, damaged, not a state or of another layer, or if a tensor
            has another shape or holds NaN.
    """
    _check_arguments(path, layer)
    blank = template or (lambda capacity: layer.init_state(1, capacity=capacity))
    names = [name for name, _ in named_leaves(blank(0))]
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_fingerprint(Path(path), metadata, known or fingerprint(layer), force)
            if set(file.keys()) != set(names):
                raise InputError(
                    f"{path} holds the state of another kind of layer, or of a text: the state "
                    "of a text is read by generate --state, or by load_kept in Python"
                )
            leaves = [file.get_tensor(name).clone() for name in names]  # aligned memory
    except FileNotFoundError as error:
        raise InputError(f"no such state file: {path}") from error
    except (SafetensorError, OSError) as error:
        reason = "it is a folder" if Path(path).is_dir() else error
        raise InputError(f"cannot read {path} as a state: {reason}; save it again") from error
    state = pytree.tree_unflatten(leaves, pytree.tree_structure(blank(0)))
    if fault := state_fault(state, blank):
        raise InputError(
            f"{path} does not fit: {fault}; load it with the model that saved it, or save another"
        )
    if template is None and (fault := count_fault(state, layer)):
        raise InputError(f"{path} is damaged: {fault}; save it again")
    if metadata.get("content") != _digest(state):
        raise InputError(f"{path} is damaged: its numbers differ from those saved; save it again")
    return to(state, device=next(layer.parameters(), torch.empty(0)).device)


def _check_arguments(path: object, layer: object) -> None:
    """Of functions that write or read the state of a layer."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path must be the name of a file, got {path!r}: give such as 'my_state'")
    check_kind("layer", layer, nn.Module, "the layer or model of the state")
    check_unwrapped("layer", layer)


def fingerprint(layer: nn.Module) -> dict[str, str]:
    """Hashes of a layer's configuration and of its weights.

    The configuration is the type and the settings (:func:`settings_of`) of every module, since
    layers with the same weights may differ in their settings.
    """
    check_unwrapped("layer", layer)
    layer = uncompiled(layer)
    config, weights = hashlib.sha256(), hashlib.sha256()
    for path, module in layer.named_modules():
        if not isinstance(module, nn.Dropout):  # it acts in training only
            config.update(f"{path} {type(module).__name__} {settings_of(module)}".encode())
    for name, tensor in {**dict(layer.named_buffers()), **layer.state_dict()}.items():
        config.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        weights.update(_bytes(tensor))
    return {"config": config.hexdigest(), "weights": weights.hexdigest()}


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Settings of a layer; of another module, the arguments of its constructor that it keeps.

    Modules and tensors are left out, and so are probabilities of dropout, which acts in training
    only.

    Example:
        >>> settings_of(nn.RMSNorm(4, eps=1e-6))
        {'normalized_shape': (4,), 'eps': 1e-06, 'elementwise_affine': True}
    """
    settings = getattr(module, "settings", None)
    own = vars(settings) if isinstance(settings, Settings) else {}
    names = inspect.signature(type(module)).parameters
    return _plain({name: own.get(name, getattr(module, name, module)) for name in names})


_PLAIN = (int, float, str, tuple, type(None))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are numbers, words and the like; a configuration as its own settings."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Choice):
            value = str(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(value, Mapping):
            if inner := _plain(value):
                found[name] = inner
        elif isinstance(value, _PLAIN) and not name.endswith("dropout"):
            found[name] = value
    return found


def _check_fingerprint(path: Path, found: Fingerprint, wanted: Fingerprint, force: bool) -> None:
    if (form := found.get("format", "")) != _FORMAT:
        if form.startswith("stateline-state-"):
            raise InputError(
                f"{path} was saved by another version of Stateline ({form}, wanted {_FORMAT}): "
                "compute the state again"
            )
        raise InputError(f"{path} is not a state file (wanted format {_FORMAT})")
    for part, meaning in (("config", "another configuration"), ("weights", "other weights")):
        if found.get(part) != wanted[part] and not force:
            raise ForeignState(
                f"{path} was saved by a model with {meaning}; load it with the model that saved "
                "it, or override with force (--force)"
            )


def state_fault(state: State, template: Callable[[int], State], *, rows: int | None = None) -> str:
    """The first fault of a state that was read from a file, in words; empty if there is none.

    The sizes of all axes that do not grow must equal those of the template, and no number may be
    NaN.

    Args:
        state: The state, with the structure of the template.
        template: Returns a state of one row with room for the given number of steps.
        rows: Number of rows that the state must have. Its dtypes must then be those of the
            template, and no counter negative. Without it, floats may have any precision.
    """
    found, small, large = named_leaves(state), leaves_of(template(0)), leaves_of(template(1))
    count = next((len(leaf) for _, leaf in found if leaf.ndim), 0) if rows is None else rows
    for (name, leaf), least, roomy in zip(found, small, large, strict=True):
        floats = leaf.is_floating_point() and least.is_floating_point()
        if leaf.dtype != least.dtype and not (floats and rows is None):
            return f"its {name} is {leaf.dtype}, not {least.dtype}"
        if not has_sizes(leaf.shape, (count, *sizes_of(least, roomy)[1:])):
            wanted = count, *least.shape[1:]
            return f"its {name} has the shape {tuple(leaf.shape)}, not {wanted}"
        if floats and leaf.isnan().any():
            return f"its {name} holds NaN"
        if rows is not None and not floats and leaf.numel() and leaf.min() < 0:
            return f"its {name} is negative"
    return ""


def count_fault(state: State, layer: Any) -> str:
    """The first counter of tokens that does not agree with what a state holds; empty if all do.

    A counter that is too large would let steps write outside of the state's tensors, or reserve
    memory for tokens that nobody has read.
    """
    least, roomy = (layer.init_state(1, capacity=n) for n in (0, 1))
    leaves, own = named_leaves(state), leaves_of(least)
    counters = [(n, x) for n, x in leaves if x.numel() and x.dtype == torch.int64]
    read = getattr(state, "position", None)
    for name, counter in counters:
        if counter.min() < 0:
            return f"its {name} is negative"
        if read is not None and counter.shape == read.shape and bool((counter > read).any()):
            return f"its {name} is {int(counter.max())} after {int(read.max())} tokens"
    most = max((int(counter.max()) for _, counter in counters), default=0)
    held = sum(x.numel() * of.element_size() for (_, x), of in zip(leaves, own, strict=True))
    if counters and (most >= _MOST or layer.state_bytes(most) * len(counters[0][1]) > held):
        return f"it holds fewer than {most} tokens"
    return _overfull(state, least, roomy)


def _overfull(state: State, least: State, roomy: State) -> str:
    """The first length that is beyond the slots beside it."""
    if isinstance(state, Tensor):
        return ""
    length: Any = getattr(state, "length", None)
    parts = list(zip(state, least, roomy, strict=True))
    for part, *sizes in parts if isinstance(length, Tensor) and length.numel() else ():
        grows = sizes_of(*sizes)[1:] if isinstance(part, Tensor) else ()
        if None in grows and int(length.max()) > (slots := part.shape[1 + grows.index(None)]):
            return f"a length is {int(length.max())}, beyond its {slots} slots"
    return next(filter(None, (_overfull(*part) for part in parts)), "")


def sizes_of(least: Tensor, roomy: Tensor) -> tuple[int | None, ...]:
    """Sizes of the axes of a tensor of a state; ``None`` for rows and what a capacity enlarges."""
    pairs = zip(least.shape[1:], roomy.shape[1:], strict=True)
    return None, *(small if small == large else None for small, large in pairs)


def has_sizes(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    """Whether a shape has axes of these sizes; ``None`` stands for any size."""
    return len(shape) == len(sizes) and all(
        size in (None, own) for own, size in zip(shape, sizes, strict=True)
    )


def _digest(state: State) -> str:
    """Hash of all tensors of a state."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(state):
        digest.update(json.dumps([name, list(leaf.shape), str(leaf.dtype)]).encode())
        digest.update(_bytes(leaf))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    flat = flat.as_strided(flat.shape, (1,))  # one number may have any stride, and has no view then
    return flat.view(torch.uint8).numpy().data


def named_leaves(state: State) -> list[tuple[str, Tensor]]:
    """The tensors of a state, in order, each with the way to it: ``.layers[0].h``."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _like(part: State, parts: Sequence[State]) -> State:
    """Tuple of the same type as ``part``."""
    return getattr(part, "_make", tuple)(parts)


def shown(value: object) -> str:
    """Dtype and shape of a tensor, or the type of anything else, for messages.

    Example:
        >>> shown(torch.zeros(2, 3)), shown([2, 3])
        ('torch.float32 of (2, 3)', 'list')
    """
    return (
        f"{value.dtype} of {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )
