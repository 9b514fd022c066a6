"""Checkpoints: all that a run needs to go on as if it had never stopped.

A checkpoint is a folder ``checkpoints/step-00000500``: the model (``config.json`` and
``model.safetensors``, so that it can be used by itself), ``training.safetensors`` (the optimizer's
moments, the carried state, the random state) and ``training.json`` (the rest). It appears whole or
not at all. Nothing in it is pickled, and it does not depend on the number of processes.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.files import write_folder, write_text
from stateline.layers.state import to
from stateline.models.checkpoint import WEIGHTS, save_model
from stateline.models.make import AnyModel
from stateline.models.pattern import check_settings

FOLDER = "checkpoints"
TENSORS, RECORD = "training.safetensors", "training.json"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        steps: Updates done.
        tokens: Tokens trained on.
        seconds: Time spent in updates.
        losses: Of the updates since the last line of metrics.
        steps_to_solve: Updates before the first score that reached the task's ``solved_at``.
        stopped: Empty while it runs; then why it ended.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    steps_to_solve: int | None = None
    stopped: str = ""


class Snapshot(NamedTuple):
    """Everything that changes in training, whole, on the main process's CPU."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    carried: Any
    progress: Progress


def whole_weights(model: AnyModel) -> dict[str, Tensor]:
    """All weights, even of a model that is sharded: on the main process, but all must call this."""
    weights: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
    return weights


def whole_moments(model: AnyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter and kind, likewise."""
    state: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE).get("state", {})
    return {
        f"{parameter}/{kind}": value
        for parameter, kinds in state.items()
        for kind, value in kinds.items()
    }


def write(folder: Path, model: AnyModel, snapshot: Snapshot, run: Any, keep: int) -> Path:
    """Write a checkpoint into a run's folder, and remove all but the newest ``keep``.

    Args:
        folder: Of the run.
        model: For its configuration.
        snapshot: What to keep.
        run: What defines the run, as plain data (only the same goes on from here), and under
            ``environment`` where it ran.
        keep: How many checkpoints to keep, this one included.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: If it cannot be written; the older ones are as they were.
    """
    tensors = {f"moments/{name}": tensor for name, tensor in snapshot.moments.items()}
    leaves = [] if snapshot.carried is None else pytree.tree_leaves(snapshot.carried)
    for number, leaf in enumerate(leaves):
        tensors[f"carried/{number}"] = leaf.detach().cpu()
    tensors["random"] = torch.get_rng_state()
    record = {"progress": asdict(snapshot.progress), **run}

    def fill(draft: Path) -> None:
        save_model(model, draft, weights=snapshot.weights)
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, draft / TENSORS)
        write_text(draft / RECORD, json.dumps(record))

    path = folder / FOLDER / f"step-{snapshot.progress.steps:08}"
    write_folder(path, fill)
    for old in found(folder)[:-keep]:
        old.rename(old.with_name(f".{old.name}"))  # half of it is no checkpoint
    for leftover in (folder / FOLDER).glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return path


def found(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((folder / FOLDER).glob(f"step-{'[0-9]' * 8}"))


def other_environment(path: Path, now: Mapping[str, str | int]) -> str:
    """What of the machine or PyTorch differs from where a checkpoint was written, in words."""
    names = ("torch", "cpu", "threads", "device", "processes")
    try:
        then = json.loads((path / RECORD).read_text(encoding="utf-8"))["environment"]
        return ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in names if then[n] != now[n])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""  # what is wrong with it, ``read`` will say


def read(path: Path, model: AnyModel, optimizer: torch.optim.Optimizer, run: Any) -> Snapshot:
    """Bring model, optimizer and random state to where a checkpoint left them.

    Args:
        path: Folder of the checkpoint.
        model: Built from the same configuration.
        optimizer: Of the model.
        run: What defines the run that wants to go on.

    Returns:
        What was kept; the carried state is that of the whole batch.

    Raises:
        InputError: If the checkpoint is damaged, or of another run.
    """
    with _damaged(path):
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        progress, before = _progress(path, record["progress"]), {n: record[n] for n in run}
    if different := _difference(before, json.loads(json.dumps(run))):
        raise InputError(
            f"{path} is of a run with another {different}: give the same, or choose another folder"
        )
    with _damaged(path):
        weights, tensors = load_file(path / WEIGHTS), load_file(path / TENSORS)
        random, carried = tensors["random"], _carried(model, _below(tensors, "carried/"))
        _check_shapes(weights, model)
    optimizer.zero_grad()  # with gradients left, PyTorch takes its state for initialised
    set_model_state_dict(model, {**weights}, options=_WHOLE)
    _set_moments(model, optimizer, _below(tensors, "moments/"))
    torch.set_rng_state(random)
    return Snapshot(weights, {}, carried, progress)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Whatever goes wrong here is the checkpoint's fault."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(
            f"the checkpoint {path} is damaged: {error}; remove it to go on from an older one"
        ) from error


def _progress(path: Path, kept: Mapping[str, Any]) -> Progress:
    """What was kept of it, if it is whole and that of the folder."""
    if kept.keys() != vars(Progress()).keys():
        raise ValueError("its progress is not whole")
    progress = Progress(**kept)
    check_settings("its progress", progress)
    if path.name != f"step-{progress.steps:08}":
        raise ValueError(f"it is of step {progress.steps}")
    return progress


def _check_shapes(weights: Mapping[str, Tensor], model: AnyModel) -> None:
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != {name: tensor.shape for name, tensor in model.state_dict().items()}:
        raise ValueError("its weights are those of another model")


def _carried(model: AnyModel, tensors: Mapping[str, Tensor]) -> Any:
    """The carried state, on the model's device; nothing if none was kept."""
    if not tensors:
        return None
    template = model.init_state(1)
    leaves = [tensors[str(number)].clone() for number in range(len(tensors))]
    return to(
        pytree.tree_unflatten(leaves, pytree.tree_structure(template)),
        device=template.position.device,
    )


def _set_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give the optimizer its state back; learning rates and groups come from the configuration."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parameter, _, kind = name.rpartition("/")
        state.setdefault(parameter, {})[kind] = tensor.clone()
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    whole: dict[str, Any] = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, whole, options=_WHOLE)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _difference(before: Any, now: Any, name: str = "run") -> str:
    """What differs first between two trees of plain data, in words; nothing if they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if text := _difference(before.get(key), now.get(key), key):
                return text
        return ""
    return "" if before == now else f"{name} ({before} then, {now} now)"
