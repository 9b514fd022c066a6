"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint is a folder ``checkpoints/step-00000500`` with the model (``config.json`` and
``model.safetensors``, so that it can be used by itself), ``training.safetensors`` (the optimizer's
moments, the carried state, the random state), ``training.json`` (everything else) and
``manifest.json`` (a hash of each file). Several processes divide the tensors among
``model-00001-of-00002.safetensors`` and so on, as transformers divides large models, and
``training-00001-of-00002.safetensors``. Each tensor is whole in one file, so any number of
processes can read a checkpoint, each only the parts that it needs. It becomes visible when all
files are complete. Nothing in it is pickled. It is checked as a whole before anything is changed.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import cannot_write, sha256, sync, write_text
from stateline.models.checkpoint import CONFIG, HASHES, INDEX, WEIGHTS, save_model
from stateline.models.factory import AnyModel
from stateline.train.folder import CHECKPOINTS, MANIFEST, RECORD, found
from stateline.train.parts import Copies, HeldRows, memory_for
from stateline.train.processes import Processes
from stateline.train.tensor_files import ordered, write_tensors

TENSORS = "training.safetensors"


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
        copies: Buffers for the copies; a previous save that used them must be committed.

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
        self._best = f"step-{record['progress'].get('best_step') or 0:08}"
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
        """Make the checkpoint visible, and remove all but the newest ``keep`` and the best.

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
        """This process's part of every tensor, in the order of the files."""
        tensors, count, rank = _tensors(model, optimizer), self.processes.count, self.processes.rank
        owners = _owners([tensor.nbytes for _, _, tensor in tensors], count)
        items = [
            _Item(part_name(file, owner, count), name, owner, HeldRows.of(tensor, owner, rank))
            for (file, name, tensor), owner in zip(tensors, owners, strict=True)
        ]
        if count > 1:
            self._texts[INDEX] = _index(
                (name, tensor.nbytes, part_name(file, owner, count))
                for (file, name, tensor), owner in zip(tensors, owners, strict=True)
                if file == WEIGHTS
            )
        leaves = [] if carried is None else pytree.tree_leaves(carried)
        own_state = {f"carried/{n}": leaf for n, leaf in enumerate(leaves)}
        if rank == 0:
            own_state["random"] = torch.get_rng_state()
        for name, tensor in own_state.items():
            file, part = part_name(TENSORS, rank, count), HeldRows.of(tensor, rank, rank)
            items.append(_Item(file, name, rank, part))
        return items

    def _write(self, items: list["_Item"]) -> None:
        """Write this process's files, and send the others what they write."""
        rank, group = self.processes.rank, self.processes.background
        files: dict[str, dict[str, HeldRows]] = {}
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
        except RuntimeError:  # a connection failed
            problems = ["another process has ended"]
        self._problem = next(filter(None, problems), "")

    def _write_file(self, file: str, parts: dict[str, HeldRows]) -> str:
        """Write a file; return what went wrong, or an empty text."""
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
                    fetch(name)  # or the other processes would wait for ever
            return error.strerror or str(error)
        return ""

    def _publish(self, problems: list[str], hashes: dict[str, str], keep: int) -> None:
        """Complete the draft, give it its name, and remove old checkpoints."""
        folder = self.path.parent
        try:
            if problems:
                raise OSError(problems[0])
            for name, text in self._texts.items():
                write_text(self._draft / name, text)
                hashes[name] = sha256(self._draft / name)
            model = {n: h for n, h in hashes.items() if not n.startswith("training")}
            write_text(self._draft / HASHES, json.dumps(model, indent=1) + "\n")
            hashes[HASHES] = sha256(self._draft / HASHES)
            manifest = {"sha256": dict(sorted(hashes.items()))}
            write_text(self._draft / MANIFEST, json.dumps(manifest))
            sync(self._draft)
            os.replace(self._draft, self.path)
            for changed in (folder, folder.parent):
                sync(changed)
            for old in found(folder.parent)[:-keep]:
                if old.name != self._best:
                    os.replace(old, self._hidden(old))
            for hidden in folder.glob(".step-*"):
                shutil.rmtree(hidden, ignore_errors=True)
        except (OSError, InputError) as error:
            shutil.rmtree(self._draft, ignore_errors=True)
            raise cannot_write(self.path, error.__cause__ or error) from error

    @staticmethod
    def _hidden(path: Path) -> Path:
        """The name of a checkpoint while it is removed: a partly removed one must not be found."""
        return path.with_name(f".{path.name}")


class _Item(NamedTuple):
    """A tensor of a checkpoint."""

    file: str
    name: str
    owner: int  # the process that writes it
    part: HeldRows


def _tensors(model: AnyModel, optimizer: torch.optim.Optimizer) -> list[tuple[str, str, Tensor]]:
    """Weights and moments in the order in which files have them: file, name and tensor."""
    weights = model.state_dict()  # first: it makes FSDP free what it had gathered
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


def part_name(name: str, rank: int, count: int) -> str:
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
    parts = [HeldRows.of(tensor, 0, processes.rank) for _, tensor in ordered(weights)]
    if not processes.main:
        for part in parts:
            part.send(0)()
        return
    memory, left = memory_for(parts), iter(parts)

    def write(file: Path) -> None:
        likes = {name: torch.empty_like(x, device="meta") for name, x in weights.items()}
        write_tensors(file, likes, lambda _: next(left).whole(0, memory))

    try:
        save_model(model, folder, write=write)
    finally:
        for part in left:  # after an error, or the other processes would wait for ever
            part.whole(0, memory)
