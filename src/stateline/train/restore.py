"""Reading a checkpoint: it is checked as a whole before a model or an optimizer is changed.

Hashes say that the numbers are those that were written; names, shapes and dtypes, that they fit the
model. Checks raise ValueError with what is wrong.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.layers.state import cat_states, select_rows, state_fault, to
from stateline.models.checkpoint import WEIGHTS
from stateline.models.factory import AnyModel, meta_model
from stateline.train.checkpoint import TENSORS
from stateline.train.folder import BROKEN, MANIFEST, found, is_whole, opened
from stateline.train.metrics import Progress
from stateline.train.optimizer import Moments, moments_like, set_moments
from stateline.train.processes import own_rows
from stateline.train.same_run import difference
from stateline.train.tensor_files import Entry, entries
from stateline.train.update import Updater

_log = logging.getLogger("stateline")


def read(path: Path, update: Updater, defined_by: Mapping[str, Any]) -> Progress:
    """Restore model, optimizer, carried and random state from a checkpoint.

    The whole checkpoint is checked first: hashes, names, shapes and dtypes. Nothing is changed if
    it is damaged. All processes must call this: each checks some of the files, and then
    reads its own part of every tensor.

    Args:
        path: Folder of the checkpoint.
        update: The model, its optimizer and the state that it carries.
        defined_by: What defines the run, as plain data.

    Raises:
        InputError: If the checkpoint is of another run, or is damaged. Then the message names the
            newest older checkpoint that is whole.
    """
    problem, different, contents, processes = "", "", None, update.processes
    try:
        files, record = opened(path, processes.rank, processes.count)
        elsewhere = _elsewhere(record["environment"], processes.environment())
        different = difference(record, defined_by)
        if not different:
            contents = _examined(path, files, record["progress"], update)
    except BROKEN as error:
        name = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        problem = " ".join(name.split())
    if problems := [told for told in processes.share(problem) if told]:
        older = [old.name for old in found(path.parents[1]) if old.name < path.name]
        whole = next((old for old in reversed(older) if is_whole(path.with_name(old))), "")
        way_out = f"remove it to go on from {whole}, which is whole"
        if not whole:
            way_out = "no older one is whole: remove all to begin again"
        raise InputError(f"the checkpoint {path} is damaged: {problems[0]}; {way_out}")
    if contents is None:
        raise InputError(
            f"{path} comes from a run with other settings: {different}; give the same, or choose "
            "another folder"
        )
    if elsewhere and processes.main:
        _log.warning("results may differ in the last bits from an uninterrupted run: %s", elsewhere)
    return _restored(contents, update)


class _Contents(NamedTuple):
    """A checkpoint that has been checked; weights and moments are not in memory."""

    progress: Progress
    weights: Mapping[str, Entry]
    moments: Mapping[str, Entry]
    likes: Mapping[str, Moments]  # tensors like the moments of each parameter
    state: Any  # the carried state of this process's rows
    random: Tensor


def _examined(path: Path, files: list[str], kept: Mapping[str, Any], update: Updater) -> _Contents:
    """Check names, shapes and dtypes of all tensors."""
    model, progress = update.model, _progress(path, kept)
    of_weights, parts = (
        [entries(path / name) for name in files if name.startswith(kind.partition(".")[0])]
        for kind in (WEIGHTS, TENSORS)
    )
    if not parts:
        raise ValueError(f"{MANIFEST} does not list its files")
    for name in {name for part in parts for name in part}:
        if name != "random" and not name.startswith(("moments/", "carried/")):
            raise ValueError(f"{TENSORS} has {name!r}, which no checkpoint has")
    weights = _joined(of_weights)
    _check_tensors("weights", weights, model.state_dict())
    moments = _joined([_below(part, "moments/") for part in parts])
    likes = moments_like(model, update.optimizer, update.config)
    _check_moments(moments, likes, progress.steps)
    state = _own_state([_below(part, "carried/") for part in parts], update)
    random = parts[0]["random"].read()
    _check_tensors("random state", {"random": random}, {"random": torch.get_rng_state()})
    return _Contents(progress, weights, moments, likes, state, random)


def _restored(contents: _Contents, update: Updater) -> Progress:
    """Fill the model, its optimizer, the carried and the random state."""
    model, optimizer = update.model, update.optimizer
    optimizer.zero_grad()
    for name, tensor in model.state_dict().items():  # before the parameters are asked for, since
        # FSDP leaves the outermost module's parameters gathered, which the optimizer does not know
        contents.weights[name].fill(*own_rows(tensor))
    for name, likes in contents.likes.items():
        if moments := _moments(contents.moments, name, likes):
            set_moments(optimizer, model.get_parameter(name), moments)
    torch.set_rng_state(contents.random)
    if contents.state is not None:
        update.carry(contents.state)
    return contents.progress


def _progress(path: Path, kept: Mapping[str, Any]) -> Progress:
    """The progress of a checkpoint, if it is complete and agrees with the folder's name."""
    if kept.keys() != vars(Progress()).keys():
        raise ValueError("its progress is incomplete")
    progress = Progress(**kept)
    if path.name != f"step-{progress.steps:08}":
        raise ValueError(f"its progress is of step {progress.steps}")
    return progress


def _check_tensors(
    kind: str, tensors: Mapping[str, Entry | Tensor], wanted: Mapping[str, Tensor]
) -> None:
    """Compare names, shapes and dtypes with other tensors'."""
    for name in {**wanted, **tensors}:
        if name not in tensors:
            raise ValueError(f"its {kind} lack {name!r}")
        if name not in wanted:
            raise ValueError(f"its {kind} have {name!r}, which the model does not have")
        found, like = tensors[name], wanted[name]
        if found.shape != like.shape or found.dtype != like.dtype:
            raise ValueError(
                f"its {kind} {name!r} are {found.dtype} of shape {tuple(found.shape)}, not "
                f"{like.dtype} of shape {tuple(like.shape)}"
            )


def _check_moments(
    moments: Mapping[str, Entry], wanted: Mapping[str, Mapping[str, Tensor]], steps: int
) -> None:
    """Check the optimizer's moments of every parameter that has had a gradient; others have none.

    Args:
        moments: By ``parameter/kind``.
        wanted: Tensors like the moments of each parameter.
        steps: Number of updates.
    """
    owners = {name.rpartition("/")[0] for name in moments}
    expected = {f"{o}/{kind}": x for o in owners & wanted.keys() for kind, x in wanted[o].items()}
    _check_tensors("moments", moments, expected)
    if steps and not moments:
        raise ValueError("it has no moments")


def _own_state(blocks: list[dict[str, Entry]], update: Updater) -> Any:
    """The carried state of this process's rows, from the blocks that hold them.

    Args:
        blocks: For each process that wrote it, the leaves of its rows' state by number.
        update: The run that continues.
    """
    if not update.config.carry_state:
        if any(blocks):
            raise ValueError("it has a carried state, but the run carries none")
        return None
    rows = update.processes.rows(update.task.batch_size)
    size = update.task.batch_size // len(blocks)
    first, last = rows.start // size, -(-rows.stop // size)
    weight = next(update.model.parameters())
    like = meta_model(update.model.config).to(weight.dtype)
    states = [_state(block, like, size) for block in blocks[first:last]]
    whole = cat_states(states) if len(states) > 1 else states[0]
    place = range(rows.start - first * size, rows.stop - first * size)
    if len(place) < size * len(states):
        whole = select_rows(whole, place)
    return to(whole, device=weight.device)


def _state(leaves: Mapping[str, Entry], model: AnyModel, rows: int) -> Any:
    """The carried state of some rows, for a model on the meta device."""

    def template(capacity: int) -> Any:
        return model.init_state(1, capacity=capacity)

    structure = pytree.tree_structure(template(0))
    if leaves.keys() != {str(number) for number in range(structure.num_leaves)}:
        raise ValueError(f"its carried state must have {structure.num_leaves} tensors")
    tensors = [leaves[str(number)].read() for number in range(structure.num_leaves)]
    state = pytree.tree_unflatten(tensors, structure)
    if fault := state_fault(state, template, rows=rows):
        raise ValueError(f"of its carried state, {fault}")
    return state


def _moments(found: Mapping[str, Entry], name: str, likes: Moments) -> Moments:
    """This process's part of the optimizer's moments of a parameter; empty if there are none."""
    moments = {}
    for kind, like in likes.items():
        if entry := found.get(f"{name}/{kind}"):
            device = "cpu" if like.is_meta else None
            moments[kind] = torch.empty_like(like, device=device)
            entry.fill(*own_rows(moments[kind]))
    return moments


def _joined(parts: list[dict[str, Entry]]) -> dict[str, Entry]:
    """The tensors of all files, each of which is in one."""
    joined: dict[str, Entry] = {}
    for part in parts:
        if twice := joined.keys() & part.keys():
            raise ValueError(f"{min(twice)!r} is in two of its files")
        joined |= part
    return joined


def _below(tensors: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    return {n.removeprefix(prefix): e for n, e in tensors.items() if n.startswith(prefix)}


def _elsewhere(then: Mapping[str, str | int], now: Mapping[str, str | int]) -> str:
    """How the machine or PyTorch differs from where a checkpoint was written, in words."""
    names = ("torch", "cpu", "threads", "device", "processes")
    return ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in names if then[n] != now[n])
