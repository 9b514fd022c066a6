"""Reading a checkpoint: it is checked as a whole before a model or an optimizer is changed.

Checks raise ValueError with what is wrong.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import has_hash, read_json_object, regular_file
from stateline.generate.state_files import state_fault
from stateline.layers.state import cat_states, select_rows, to
from stateline.models.checkpoint import CONFIG, WEIGHTS
from stateline.models.factory import AnyModel, meta_model
from stateline.settings import check_settings
from stateline.train.checkpoint import MANIFEST, RECORD, TENSORS, part_name
from stateline.train.folder import found
from stateline.train.metrics import Ending, Progress
from stateline.train.optimizer import Moments, moments_like, set_moments
from stateline.train.processes import Processes, own_rows
from stateline.train.same_run import Wanted
from stateline.train.tensor_files import Entry, entries


def read(
    path: Path,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    wanted: Wanted,
    processes: Processes,
) -> tuple[Progress, Any]:
    """Restore model, optimizer and random state from a checkpoint.

    The whole checkpoint is checked first: hashes, names, shapes, dtypes and ranges. Model and
    optimizer are not changed if it is damaged. All processes must call this: each checks some of
    the files, and then reads its own part of every tensor.

    Args:
        path: Folder of the checkpoint.
        model: A model of the same configuration.
        optimizer: Optimizer of the model.
        wanted: What the checkpoint must fit.
        processes: The processes.

    Returns:
        The progress, and the carried state of this process's rows, on the model's device.

    Raises:
        InputError: If the checkpoint is damaged, with the newest older one that is whole; or if
            it is of another run.
    """
    try:
        contents = _checked(path, model, optimizer, wanted, processes)
    except _Damage as damage:
        way_out = "no older one is whole: remove all to begin again"
        for older in reversed(found(path.parents[1])):
            if older.name < path.name and _is_whole(older, model, optimizer, wanted, processes):
                way_out = f"remove it to go on from {older.name}, which is whole"
                break
        raise InputError(f"the checkpoint {path} is damaged: {damage}; {way_out}") from damage
    optimizer.zero_grad()
    for name, tensor in model.state_dict().items():  # before the parameters are asked for, since
        # FSDP leaves the outermost module's parameters gathered, which the optimizer does not know
        contents.weights[name].fill(*own_rows(tensor))
    for name, likes in moments_like(model, optimizer, wanted.optimizer).items():
        if moments := _moments(contents.moments, name, likes):
            set_moments(optimizer, model.get_parameter(name), moments)
    torch.set_rng_state(contents.random)
    return contents.progress, _own_state(contents.blocks, model, wanted.rows, processes)


class _Contents(NamedTuple):
    """A checkpoint that has been checked, of which nothing but the random state is in memory."""

    progress: Progress
    weights: Mapping[str, Entry]
    moments: Mapping[str, Entry]
    blocks: list[dict[str, Entry]]  # of the carried state, by the process that wrote it
    random: Tensor


class _Damage(ValueError):
    """A fault of a checkpoint."""


_BROKEN = OSError, SafetensorError, ValueError, KeyError, TypeError
"""Exceptions that a damaged checkpoint may cause."""


def _is_whole(path: Path, *fit: Any) -> bool:
    try:
        _checked(path, *fit)
    except (_Damage, InputError):
        return False
    return True


def _checked(
    path: Path,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    wanted: Wanted,
    processes: Processes,
) -> _Contents:
    """Check all of a checkpoint; nothing is changed. All processes find the same.

    Raises:
        _Damage: If it is damaged.
        InputError: If it is of another run.
    """
    try:
        names = files(path)
        check_manifest(path, names, [name for name in names if name.endswith(".json")])
        record = read_json_object(path / RECORD, "record of the checkpoint")
        different = wanted.difference(record)
    except _BROKEN as error:
        raise _Damage(_line(error)) from error
    if different:
        raise InputError(
            f"{path} comes from a run with other settings: {different}; give the same, or choose "
            "another folder"
        )
    problem, contents = "", None
    try:
        contents = _examined(path, record["progress"], model, optimizer, wanted, processes)
    except _BROKEN as error:
        problem = _line(error)
    problems = [found for found in processes.share(problem) if found]
    if problems or contents is None:
        raise _Damage(problems[0])
    return contents


def files(path: Path) -> list[str]:
    """The files of a checkpoint, all of which are there."""
    names = [CONFIG, *_in_parts(path, WEIGHTS), *_in_parts(path, TENSORS), RECORD]
    for name in names:
        regular_file(path / name, "file of the checkpoint")
    return names


def _in_parts(path: Path, name: str) -> list[str]:
    """The file of this name, or the files into which several processes have divided it."""
    stem, _, ending = name.rpartition(".")
    parts = sorted(part.name for part in path.glob(f"{stem}-*-of-*.{ending}"))
    if not parts or (path / name).exists():
        return [name]
    count = int(parts[0].rpartition(".")[0].rpartition("-")[2])
    return [part_name(name, rank, count) for rank in range(count)]


def _examined(
    path: Path,
    progress: Any,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    wanted: Wanted,
    processes: Processes,
) -> _Contents:
    """Check names, shapes and dtypes of all tensors, and the numbers in this process's files."""
    done = _checked_progress(path, progress, wanted.steps)
    weight_files, files = _in_parts(path, WEIGHTS), _in_parts(path, TENSORS)
    own = [*weight_files, *files][processes.rank :: processes.count]
    check_manifest(path, own, own)
    weights = _joined([entries(path / name) for name in weight_files])
    tensors = [entries(path / name) for name in files]
    _check_tensors("weights", weights, model.state_dict())
    moments = _joined([_below(part, "moments/") for part in tensors])
    _check_moments(moments, moments_like(model, optimizer, wanted.optimizer), done.steps)
    random = tensors[0]["random"].read()
    _check_random(random)
    blocks = [_below(part, "carried/") for part in tensors]
    for name in {name for part in tensors for name in part}:
        if name != "random" and not name.startswith(("moments/", "carried/")):
            raise ValueError(f"{TENSORS} has {name!r}, which no checkpoint has")
    for kind, found_tensors in (("weights", weights), ("moments", moments)):
        ours = {n: e for n, e in found_tensors.items() if e.file.name in own}
        _check_values(kind, ours, done.steps)
    for name, block in zip(files, blocks, strict=True):
        if name in own:
            _block(block, model, wanted.rows, len(blocks))
    return _Contents(done, weights, moments, blocks, random)


def check_manifest(folder: Path, names: Collection[str], checked: Iterable[str]) -> None:
    """Compare files with their hashes; checkpoints of older versions have no manifest.

    Args:
        folder: The checkpoint.
        names: The files that the manifest must list.
        checked: The files to be compared, some of which others may compare.
    """
    if not (folder / MANIFEST).exists():
        return
    hashes = read_json_object(folder / MANIFEST, "manifest").get("sha256")
    if not isinstance(hashes, dict) or not set(names) <= set(hashes):
        raise ValueError(f"{MANIFEST} does not list its files")
    for name in checked:
        if not has_hash(folder / name, hashes[name]):
            raise ValueError(f"{name} is not as it was written")


def _checked_progress(path: Path, kept: Any, steps: int) -> Progress:
    """The progress of a checkpoint, if it is complete and agrees with the folder's name."""
    if not isinstance(kept, dict) or kept.keys() != vars(Progress()).keys():
        raise ValueError("its progress is incomplete")
    progress = Progress(**kept)
    check_settings("its progress", progress)
    if path.name != f"step-{progress.steps:08}":
        raise ValueError(f"it is of step {progress.steps}")
    if progress.stopped not in ("", *get_args(Ending)):
        raise ValueError(f"its run ended as {progress.stopped[:40]!r}")
    solved = progress.steps_to_solve or 0
    if not 0 <= solved <= progress.steps <= steps or progress.tokens < 0 or progress.seconds < 0:
        raise ValueError("its progress is out of range")
    if not all(isinstance(loss, float) and math.isfinite(loss) for loss in progress.losses):
        raise ValueError("its losses are not finite numbers")
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


def _check_values(kind: str, tensors: Mapping[str, Entry], steps: int) -> None:
    """Refuse NaN and infinity, negative mean squares and impossible numbers of steps."""
    for name, entry in tensors.items():
        most = steps if name.endswith("/step") else math.inf
        positive = name.endswith(("/exp_avg_sq", "_var", "/variance", "/step"))
        for piece in entry.pieces():
            if not piece.isfinite().all():
                raise ValueError(f"its {kind} {name!r} are not all finite")
            if positive and piece.min() < 0:
                raise ValueError(f"its {kind} {name!r} are negative")
            if piece.max() > most:
                raise ValueError(f"its {kind} {name!r} are of step {float(piece.max()):g}")


def _check_moments(
    moments: Mapping[str, Entry], wanted: Mapping[str, Mapping[str, Tensor]], steps: int
) -> None:
    """Check the optimizer's moments of every parameter; one without any gradient has none.

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


def _check_random(random: Tensor) -> None:
    """Check that a generator accepts a random state."""
    generator = torch.Generator()
    like = generator.get_state()
    _check_tensors("random state", {"random": random}, {"random": like})
    try:
        generator.set_state(random)
    except RuntimeError as error:
        raise ValueError("its random state is invalid") from error


def _block(entries: Mapping[str, Entry], model: AnyModel, rows: int | None, blocks: int) -> Any:
    """The carried state of the rows of one of the processes that wrote it."""
    if rows is None:
        if entries:
            raise ValueError("it has a carried state, but the run carries none")
        return None
    like = meta_model(model.config).to(next(model.parameters()).dtype)

    def template(capacity: int) -> Any:
        return like.init_state(1, capacity=capacity)

    return _checked_carried(entries, template, rows // blocks)


def _checked_carried(
    tensors: Mapping[str, Entry], template: Callable[[int], Any], rows: int
) -> Any:
    """The carried state of some rows.

    Args:
        tensors: Its leaves by number.
        template: Returns a state of one row of the model, with room for some steps.
        rows: Their number.
    """
    structure = pytree.tree_structure(template(0))
    if tensors.keys() != {str(number) for number in range(structure.num_leaves)}:
        raise ValueError(f"its carried state must have {structure.num_leaves} tensors")
    leaves = [tensors[str(number)].read() for number in range(structure.num_leaves)]
    state = pytree.tree_unflatten(leaves, structure)
    if fault := state_fault(state, template, rows=rows):
        raise ValueError(f"of its carried state, {fault}")
    return state


def _own_state(
    blocks: list[dict[str, Entry]], model: AnyModel, rows: int | None, processes: Processes
) -> Any:
    """The carried state of this process's rows, from the blocks that hold them."""
    if rows is None:
        return None
    own, size = processes.rows(rows), rows // len(blocks)
    first, last = own.start // size, -(-own.stop // size)
    states = [_block(block, model, rows, len(blocks)) for block in blocks[first:last]]
    whole = cat_states(states) if len(states) > 1 else states[0]
    place = range(own.start - first * size, own.stop - first * size)
    if len(place) < size * len(states):
        whole = select_rows(whole, place)
    return to(whole, device=next(model.parameters()).device)


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


def _line(error: BaseException) -> str:
    """An error in one line."""
    name = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(name.split())


def other_environment(path: Path, now: Mapping[str, str | int]) -> str:
    """How the machine or PyTorch differs from where a checkpoint was written, in words."""
    names = ("torch", "cpu", "threads", "device", "processes")
    try:
        then = read_json_object(path / RECORD, "record of the checkpoint")["environment"]
        return ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in names if then[n] != now[n])
    except (ValueError, KeyError, TypeError):
        return ""  # ``read`` reports what is wrong
