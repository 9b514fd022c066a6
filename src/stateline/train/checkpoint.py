"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint is a folder ``checkpoints/step-00000500`` with the model (``config.json`` and
``model.safetensors``, so that it can be used by itself), ``training.safetensors`` (the optimizer's
moments, the carried state, the random state), ``training.json`` (everything else) and
``manifest.json`` (a hash of each file). Several processes divide the tensors among
``model-00001-of-00002.safetensors`` and so on, as transformers divides large models, and
``training-00001-of-00002.safetensors``. Each tensor is whole in one file, so any number of
processes can read a checkpoint, each only the parts that it needs. It becomes visible when all
files are complete, nothing in it is pickled, and it is checked as a whole before anything is
changed.
"""

import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import (
    cannot_write,
    read_json_object,
    regular_file,
    sha256,
    sync,
    write_text,
)
from stateline.layers.state import cat_states, select_rows, to
from stateline.models.checkpoint import CONFIG, HASHES, INDEX, WEIGHTS, save_model
from stateline.models.factory import AnyModel, meta_model
from stateline.train.checkpoint_checks import (
    Progress,
    check_manifest,
    check_moments,
    check_random,
    check_tensors,
    check_values,
    checked_carried,
    checked_progress,
    write_manifest,
)
from stateline.train.folder import CHECKPOINTS, found
from stateline.train.optimizer import Moments, moments_like, set_moments
from stateline.train.parts import Copies, Part, memory_for
from stateline.train.processes import Processes, own_rows
from stateline.train.tensor_files import Entry, entries, ordered, write_tensors

__all__ = ["Progress", "Save", "found", "other_environment", "read", "save_whole"]

TENSORS, RECORD = "training.safetensors", "training.json"
FILES = (CONFIG, WEIGHTS, TENSORS, RECORD)


class Wanted(NamedTuple):
    """Requirements on a checkpoint.

    Attributes:
        run: What defines the run, as plain data.
        defaults: Values of settings that are missing in checkpoints of older versions.
        steps: Planned number of updates.
        rows: Rows of the carried state; ``None`` if the run carries none.
    """

    run: Mapping[str, Any]
    defaults: Mapping[str, Any]
    steps: int
    rows: int | None


class Save:
    """A checkpoint that is being written; every process writes its part.

    One process on the CPU writes at once, from the tensors themselves. Otherwise every process
    copies what it holds to memory. While training goes on, a thread sends the copies to the
    processes that write them, and writes what this process gets, one tensor after the other: no
    process waits for another one's disk, or needs memory for more than its copy and one tensor.
    The checkpoint exists after :meth:`commit`.

    Args:
        folder: Folder of the run.
        model: The model.
        optimizer: Its optimizer.
        carried: The carried state of this process's rows, or ``None``.
        record: What else is kept, as plain data: ``progress``, what defines the run (only the same
            run continues from here), and under ``environment`` where it ran.
        processes: The processes; each makes a ``Save``.
        copies: Where what it holds is copied to; a save that used it must be committed.

    Raises:
        InputError: If it cannot be written; older checkpoints stay as they are.
    """

    def __init__(
        self,
        folder: Path,
        model: AnyModel,
        optimizer: torch.optim.Optimizer,
        carried: Any,
        record: Mapping[str, Any],
        processes: Processes,
        copies: Copies | None = None,
    ) -> None:
        self.processes = processes
        self.path = folder / CHECKPOINTS / f"step-{record['progress']['steps']:08}"
        self._draft = self.path.with_name(f".{self.path.name}.new")
        self._texts = {CONFIG: model.config.to_json(), RECORD: json.dumps(record)}
        self._hashes: dict[str, str] = {}
        self._problem = "a process stopped writing"
        processes.on_main(self._begin)
        at_once = processes.count == 1 and processes.device.type == "cpu"
        items = self._items(model, optimizer, carried)
        if not at_once:
            parts = (copies or Copies()).of([item.part for item in items])
            items = [i._replace(part=part) for i, part in zip(items, parts, strict=True)]
        self._thread = threading.Thread(target=self._write, args=[items], name="checkpoint")
        self._thread.start()
        if at_once:
            self._thread.join()

    @property
    def written(self) -> bool:
        """Whether this process has written its part."""
        return not self._thread.is_alive()

    def commit(self, keep: int) -> None:
        """Make the checkpoint visible, and remove all but the newest ``keep``.

        All processes must call this. Each waits until every process has written its part.

        Raises:
            InputError: If a part could not be written.
        """
        self._thread.join()
        parts = self.processes.share((self._problem, self._hashes))
        problems = [problem for problem, _ in parts if problem]
        hashes = {name: value for _, own in parts for name, value in own.items()}
        self.processes.on_main(lambda: self._publish(problems, hashes, keep))

    def _begin(self) -> None:
        """Make an empty draft, and remove what an earlier run has left."""
        try:
            for leftover in self.path.parent.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            self._draft.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _items(
        self, model: AnyModel, optimizer: torch.optim.Optimizer, carried: Any
    ) -> list["_Item"]:
        """What this process holds of all tensors, in the order in which files have them."""
        tensors, count, rank = _tensors(model, optimizer), self.processes.count, self.processes.rank
        owners = _owners([tensor.nbytes for _, _, tensor in tensors], count)
        items = [
            _Item(_part(file, owner, count), name, owner, Part.of(tensor, owner, rank))
            for (file, name, tensor), owner in zip(tensors, owners, strict=True)
        ]
        if count > 1:
            self._texts[INDEX] = _index(
                (name, tensor.nbytes, _part(file, owner, count))
                for (file, name, tensor), owner in zip(tensors, owners, strict=True)
                if file == WEIGHTS
            )
        leaves = [] if carried is None else pytree.tree_leaves(carried)
        own_state = {f"carried/{n}": leaf for n, leaf in enumerate(leaves)}
        if rank == 0:
            own_state["random"] = torch.get_rng_state()
        for name, tensor in own_state.items():
            file, part = _part(TENSORS, rank, count), Part.of(tensor, rank, rank)
            items.append(_Item(file, name, rank, part))
        return items

    def _write(self, items: list["_Item"]) -> None:
        """Write this process's files, and send the others what they write."""
        rank, group = self.processes.rank, self.processes.background
        files: dict[str, dict[str, Part]] = {}
        sending = []
        try:
            for item in items:
                if item.owner == rank:
                    files.setdefault(item.file, {})[item.name] = item.part
                else:
                    sending.append(item.part.send(item.owner, group))
            items.clear()  # the thread's arguments live as long as the thread
            problems = [self._write_file(file, parts) for file, parts in files.items()]
            for wait in sending:
                wait()
        except RuntimeError:  # of a connection
            problems = ["another process has ended"]
        self._problem = next(filter(None, problems), "")

    def _write_file(self, file: str, parts: dict[str, Part]) -> str:
        """Write a file; what went wrong."""
        likes = {name: part.like for name, part in parts.items()}
        rank, group = self.processes.rank, self.processes.background
        memory = memory_for(list(parts.values()))

        def fetch(name: str) -> Tensor:
            return parts.pop(name).whole(rank, memory, group)

        try:
            self._hashes[file] = write_tensors(self._draft / file, likes, fetch)
        except OSError as error:
            for name, _ in ordered(likes):
                if name in parts:
                    fetch(name)  # or the others could not finish
            return error.strerror or str(error)
        return ""

    def _publish(self, problems: list[str], hashes: dict[str, str], keep: int) -> None:
        """Complete the draft, give it its name, and remove old checkpoints."""
        folder, earlier = self.path.parent, self._hidden(self.path)
        try:
            if problems:
                raise OSError(problems[0])
            for name, text in self._texts.items():
                write_text(self._draft / name, text)
                hashes[name] = sha256(self._draft / name)
            model = {n: h for n, h in hashes.items() if not n.startswith("training")}
            write_text(self._draft / HASHES, json.dumps(model, indent=1) + "\n")
            hashes[HASHES] = sha256(self._draft / HASHES)
            write_manifest(self._draft, hashes)
            sync(self._draft)
            if self.path.exists():
                os.replace(self.path, earlier)
            os.replace(self._draft, self.path)
            for changed in (folder, folder.parent):
                sync(changed)
            for old in found(folder.parent)[:-keep]:
                os.replace(old, self._hidden(old))
            for hidden in folder.glob(".step-*"):
                shutil.rmtree(hidden, ignore_errors=True)
        except (OSError, InputError) as error:
            if earlier.exists() and not self.path.exists():
                with suppress(OSError):
                    os.replace(earlier, self.path)
            shutil.rmtree(self._draft, ignore_errors=True)
            raise cannot_write(self.path, error.__cause__ or error) from error

    @staticmethod
    def _hidden(path: Path) -> Path:
        """The name of a checkpoint that is being removed: half of one must not be found."""
        return path.with_name(f".{path.name}")


class _Item(NamedTuple):
    """A tensor of a checkpoint."""

    file: str
    name: str
    owner: int  # the process that writes it
    part: Part


def _tensors(model: AnyModel, optimizer: torch.optim.Optimizer) -> list[tuple[str, str, Tensor]]:
    """Weights and moments in the order in which files have them: file, name and tensor."""
    weights = model.state_dict()  # first: FSDP then gives back what it had gathered, see ``read``
    moments = {
        f"moments/{name}/{kind}": moment
        for name, parameter in model.named_parameters()
        for kind, moment in optimizer.state.get(parameter, {}).items()
    }
    files = {WEIGHTS: weights, TENSORS: moments}
    return [(file, *pair) for file, tensors in files.items() for pair in ordered(tensors)]


def _owners(sizes: list[int], count: int) -> list[int]:
    """The process that writes each tensor: the largest first, to the one with the fewest bytes."""
    loads, owners = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def _part(name: str, rank: int, count: int) -> str:
    """The file of a process, named as transformers names the parts of a model."""
    if count == 1:
        return name
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{rank + 1:05}-of-{count:05}.{ending}"


def _index(places: Iterable[tuple[str, int, str]]) -> str:
    """The index of the weights in several files, from names, bytes and files."""
    files, size = {}, 0
    for name, n_bytes, file in places:
        files[name], size = file, size + n_bytes
    return json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=1) + "\n"


def save_whole(model: AnyModel, folder: Path, processes: Processes) -> None:
    """Write a model into a folder, as :func:`save_model` does, on the main process.

    All processes must call this. Of a sharded model, one tensor is whole at a time.

    Raises:
        InputError: If the folder cannot be written to.
    """
    weights = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in weights.values()):
        return save_model(model, folder) if processes.main else None

    parts = [Part.of(tensor, 0, processes.rank) for _, tensor in ordered(weights)]
    if not processes.main:
        for part in parts:
            part.send(0)()
        return None
    memory, left = memory_for(parts), iter(parts)

    def write(file: Path) -> None:
        likes = {name: torch.empty_like(x, device="meta") for name, x in weights.items()}
        write_tensors(file, likes, lambda _: next(left).whole(0, memory))

    try:
        save_model(model, folder, write=write)
    finally:
        for part in left:  # those that could not be written, or the others could not finish
            part.whole(0, memory)
    return None


def other_environment(path: Path, now: Mapping[str, str | int]) -> str:
    """How the machine or PyTorch differs from where a checkpoint was written, in words."""
    names = ("torch", "cpu", "threads", "device", "processes")
    try:
        then = read_json_object(path / RECORD, "record of the checkpoint")["environment"]
        return ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in names if then[n] != now[n])
    except (ValueError, KeyError, TypeError):
        return ""  # ``read`` reports what is wrong


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
    for name, likes in moments_like(model, optimizer, _optimizer(wanted)).items():
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
        before = {name: record[name] for name in wanted.run}
    except _BROKEN as error:
        raise _Damage(_line(error)) from error
    now = json.loads(json.dumps(wanted.run))
    before = _filled(before, wanted.defaults)
    if _planned(before) <= _planned(now):  # a run may be continued for more steps
        now["train"]["steps"] = before["train"]["steps"]
    if different := _difference(before, now):
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
    return [_part(name, rank, count) for rank in range(count)]


def _examined(
    path: Path,
    progress: Any,
    model: AnyModel,
    optimizer: torch.optim.Optimizer,
    wanted: Wanted,
    processes: Processes,
) -> _Contents:
    """Check names, shapes and dtypes of all tensors, and the numbers in this process's files."""
    done = checked_progress(path, progress, wanted.steps)
    weight_files, files = _in_parts(path, WEIGHTS), _in_parts(path, TENSORS)
    own = [*weight_files, *files][processes.rank :: processes.count]
    check_manifest(path, own, own)
    weights = _joined([entries(path / name) for name in weight_files])
    tensors = [entries(path / name) for name in files]
    check_tensors("weights", weights, model.state_dict())
    moments = _joined([_below(part, "moments/") for part in tensors])
    check_moments(moments, moments_like(model, optimizer, _optimizer(wanted)), done.steps)
    random = tensors[0]["random"].read()
    check_random(random)
    blocks = [_below(part, "carried/") for part in tensors]
    for name in {name for part in tensors for name in part}:
        if name != "random" and not name.startswith(("moments/", "carried/")):
            raise ValueError(f"{TENSORS} has {name!r}, which no checkpoint has")
    for kind, found_tensors in (("weights", weights), ("moments", moments)):
        ours = {n: e for n, e in found_tensors.items() if e.file.name in own}
        check_values(kind, ours, done.steps)
    for name, block in zip(files, blocks, strict=True):
        if name in own:
            _block(block, model, wanted.rows, len(blocks))
    return _Contents(done, weights, moments, blocks, random)


def _block(entries: Mapping[str, Entry], model: AnyModel, rows: int | None, blocks: int) -> Any:
    """The carried state of the rows of one of the processes that wrote it."""
    if rows is None:
        if entries:
            raise ValueError("it has a carried state, but the run carries none")
        return None
    like = meta_model(model.config).to(next(model.parameters()).dtype)

    def template(capacity: int) -> Any:
        return like.init_state(1, capacity=capacity)

    return checked_carried(entries, template, rows // blocks)


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


def _optimizer(wanted: Wanted) -> str:
    name: str = wanted.run["train"].get("optimizer", "adamw")
    return name


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


def _planned(run: Any) -> float:
    """The planned number of updates, where it is recorded."""
    train = run.get("train") if isinstance(run, dict) else None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else math.inf


def _line(error: BaseException) -> str:
    """An error in one line."""
    name = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(name.split())


def _filled(before: Any, defaults: Any) -> Any:
    """Plain data with the defaults of settings that it lacks."""
    if not isinstance(before, dict) or not isinstance(defaults, Mapping):
        return before
    return {**defaults, **{k: _filled(v, defaults.get(k)) for k, v in before.items()}}


def _difference(before: Any, now: Any, name: str = "run") -> str:
    """The first difference between two trees of plain data, in words; empty if they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            if text := _difference(before.get(key), now.get(key), key):
                return text
        return ""
    return "" if before == now else f"{name} ({before} then, {now} now)"
