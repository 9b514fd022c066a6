"""What can be done with the state of any layer: it is a value, a tree of batch-first tensors."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import write_atomically

State = Any
"""A tensor with one row per sequence, or a (named) tuple of states.

A named tuple may say more about itself, in static methods: ``accumulators()`` names the fields
whose precision :func:`to` leaves alone, ``cat(states)`` joins states whose tensors differ in shape,
``trim(state)`` gives up free room, and ``fit(state, like)`` gives it as much as another has where
free slots are not the last.
"""

_FORMAT = "stateline-state-1"


def select_rows(state: State, rows: Sequence[int] | Tensor) -> State:
    """Copy of some rows, in the given order; a row may be taken more than once (a fork).

    Example:
        >>> select_rows((torch.tensor([1, 2, 3]),), [2, 2])
        (tensor([3, 3]),)
    """
    return pytree.tree_map(lambda t: t[torch.as_tensor(rows, device=t.device)], state)


def cat_states(states: Sequence[State]) -> State:
    """Join states, which may be of different ages, into one batch; rows keep the given order."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if hasattr(first, "cat"):
        return first.cat(states)
    return _like(first, [cat_states(parts) for parts in zip(*states, strict=True)])


def replace_rows(state: State, rows: Tensor, other: State) -> State:
    """The same state, with some rows taken from another of the same layer.

    Args:
        state: State of a batch.
        rows: For each row, whether it is replaced.
        other: State of as many rows, of which those are used.

    Example:
        >>> replace_rows(torch.tensor([1, 2]), torch.tensor([False, True]), torch.tensor([8, 9]))
        tensor([1, 9])
    """
    kept, replaced = (~rows).nonzero().flatten(), rows.nonzero().flatten()
    joined = cat_states([select_rows(state, kept), select_rows(other, replaced)])
    return select_rows(joined, torch.cat([kept, replaced]).argsort())


def overwrite_rows(state: State, rows: Tensor, other: State) -> None:
    """Write some rows of another state of the same layer over those of one that is given away.

    Where one of the two has more free room, what both have room for is written: the caller knows
    that no slot in use lies beyond.
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
    """The same state without the room that ``capacity`` made and no step has used; no copy."""
    if isinstance(state, Tensor):
        return state
    if hasattr(state, "trim"):
        return state.trim(state)
    return _like(state, [trim(part) for part in state])


def detach(state: State) -> State:
    """The same state, cut off from the graph that computed it."""
    return pytree.tree_map(lambda t: t.detach(), state)


def to(
    state: State, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> State:
    """Move a state; the dtype applies to activation-like leaves only.

    Positions stay integers, and accumulators keep their precision.

    Args:
        state: Any state.
        device: Where it shall be.
        dtype: Floating-point type of keys, values and past inputs.

    Returns:
        The moved state.
    """

    def move(part: State, keeps_dtype: bool) -> State:
        if isinstance(part, Tensor):
            fixed = keeps_dtype or not part.is_floating_point()
            return part.to(device=device, dtype=part.dtype if fixed else dtype)
        names = getattr(part, "_fields", range(len(part)))
        kept = accumulators(part)
        moved = [move(p, name in kept) for name, p in zip(names, part, strict=True)]
        return _like(part, moved)

    return move(state, False)


def nbytes(state: State) -> int:
    """Bytes that the state's tensors hold.

    Example:
        >>> nbytes((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
        40
    """
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state))


def accumulators(part: State) -> tuple[str, ...]:
    """Fields of one (named) tuple that accumulate, and so stay in float32 or better."""
    declared: Callable[[], tuple[str, ...]] = getattr(part, "accumulators", tuple)
    return declared()


def save_state(path: str | Path, state: State, layer: nn.Module) -> None:
    """Write a state to a safetensors file, with its hash and the fingerprint of its layer.

    Args:
        path: File to write, atomically.
        state: State of ``layer``.
        layer: The layer or model that computed it.

    Raises:
        InputError: If the file cannot be written.
    """
    tensors = {name: leaf.detach().contiguous().clone() for name, leaf in _named_leaves(state)}
    metadata = {"format": _FORMAT, "content": _digest(state), **fingerprint(layer)}
    write_atomically(Path(path), lambda file: save_file(tensors, file, metadata=metadata))


def load_state(
    path: str | Path,
    layer: Any,
    *,
    force: bool = False,
    template: Callable[[int], State] | None = None,
) -> State:
    """Read a state written by :func:`save_state`, onto the layer's device.

    Args:
        path: File to read.
        layer: The layer or model that will go on from it.
        force: Accept a state that other weights or another configuration computed.
        template: Given a capacity, a state of one row of the kind that was saved, where that holds
            more than the layer's own.

    Returns:
        The state, ready for ``layer.forward_chunk``.

    Raises:
        InputError: If the file is missing, damaged, not a state, or of another layer; if a tensor
            has another shape, or holds NaN.
    """
    blank = template or (lambda capacity: layer.init_state(1, capacity=capacity))
    names = [name for name, _ in _named_leaves(blank(0))]
    device = next(layer.parameters(), torch.empty(0)).device
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            _check_fingerprint(Path(path), metadata, fingerprint(layer), force)
            if set(file.keys()) != set(names):
                raise InputError(f"{path} holds the state of another kind of layer")
            leaves = [file.get_tensor(name).clone() for name in names]  # aligned memory
    except FileNotFoundError as error:
        raise InputError(f"no such state file: {path}") from error
    except (SafetensorError, OSError) as error:
        reason = "it is a folder" if Path(path).is_dir() else error
        raise InputError(f"cannot read {path} as a state: {reason}; save it again") from error
    state = pytree.tree_unflatten(leaves, pytree.tree_structure(blank(0)))
    _check_leaves(Path(path), state, blank(0), blank(1))
    if metadata.get("content") != _digest(state):
        raise InputError(f"{path} is damaged: its numbers are not those saved; save it again")
    return state


def fingerprint(layer: nn.Module) -> dict[str, str]:
    """Hashes of a layer's configuration and of its weights.

    Layers of the same weights may differ in their settings: all numbers, words and buffers that a
    module keeps count.
    """
    config, weights = hashlib.sha256(), hashlib.sha256()
    config.update(f"{getattr(layer, 'config', None)}".encode())
    for path, module in layer.named_modules():
        settings = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, int | float | str) and name not in ("training", "recomputes")
        }
        config.update(f"{path} {type(module).__name__} {sorted(settings.items())}".encode())
    for name, tensor in {**dict(layer.named_buffers()), **layer.state_dict()}.items():
        config.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        weights.update(_bytes(tensor))
    return {"config": config.hexdigest(), "weights": weights.hexdigest()}


def _check_fingerprint(
    path: Path, found: dict[str, str], wanted: dict[str, str], force: bool
) -> None:
    if found.get("format") != _FORMAT:
        raise InputError(f"{path} is not a state file (wanted format {_FORMAT})")
    for part, meaning in (("config", "another configuration"), ("weights", "other weights")):
        if found.get(part) != wanted[part] and not force:
            raise InputError(
                f"{path} was saved by a model with {meaning}; load it with the model that saved "
                "it, or override with force (--force)"
            )


def _check_leaves(path: Path, state: State, least: State, roomy: State) -> None:
    """Sizes may differ from the template's in the batch, and where a capacity makes them grow."""
    found, wanted = _named_leaves(state), _named_leaves(least)
    for (name, leaf), (_, small), large in zip(
        found, wanted, pytree.tree_leaves(roomy), strict=True
    ):
        fixed = [axis for axis in range(1, small.ndim) if small.shape[axis] == large.shape[axis]]
        fits = leaf.ndim == small.ndim and leaf.shape[:1] == found[0][1].shape[:1]
        fits = fits and leaf.is_floating_point() == small.is_floating_point()
        if not fits or any(leaf.shape[axis] != small.shape[axis] for axis in fixed):
            raise InputError(
                f"{path} does not fit: its {name} is {leaf.dtype} of shape {tuple(leaf.shape)}, "
                f"that of this layer {small.dtype} of shape {tuple(small.shape)} per row; load it "
                "with the model that saved it"
            )
        if leaf.is_floating_point() and bool(leaf.isnan().any()):
            raise InputError(f"{path} holds NaN in {name}: save a state that is sound")


def _digest(state: State) -> str:
    """Hash of all that a state holds."""
    digest = hashlib.sha256()
    for name, leaf in _named_leaves(state):
        digest.update(json.dumps([name, list(leaf.shape), str(leaf.dtype)]).encode())
        digest.update(_bytes(leaf))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _named_leaves(state: State) -> list[tuple[str, Tensor]]:
    leaves, _ = pytree.tree_flatten_with_path(state)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves]


def _like(part: State, parts: Sequence[State]) -> State:
    """Tuple of the same type as ``part``."""
    make: Callable[..., State] = getattr(part, "_make", tuple)
    return make(parts)
