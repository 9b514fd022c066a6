"""Checkpoints: everything that a run needs to continue as if it had never stopped.

A checkpoint is a folder ``checkpoints/step-00000500`` with the model (``config.json`` and
``model.safetensors``, so that it can be used by itself), ``training.safetensors`` (the optimizer's
moments, the carried state, the random state), ``training.json`` (everything else) and
``manifest.json`` (a hash of each file). It is written atomically, nothing in it is pickled, and it
does not depend on the number of processes. It is checked as a whole before anything is changed.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
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
from stateline.files import read_json_object, regular_file, write_folder, write_text
from stateline.layers.state import to
from stateline.models.checkpoint import CONFIG, WEIGHTS, save_model
from stateline.models.factory import AnyModel
from stateline.train.checkpoint_checks import (
    Progress,
    check_manifest,
    check_moments,
    check_random,
    check_tensors,
    checked_carried,
    checked_progress,
    write_manifest,
)
from stateline.train.folder import CHECKPOINTS, found

__all__ = ["Progress", "Snapshot", "found", "other_environment", "read", "whole_weights", "write"]

TENSORS, RECORD = "training.safetensors", "training.json"
FILES = (CONFIG, WEIGHTS, TENSORS, RECORD)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Snapshot(NamedTuple):
    """Everything that changes in training, unsharded, on the main process's CPU."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    carried: Any
    progress: Progress


class Wanted(NamedTuple):
    """What a checkpoint must fit.

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


class _Contents(NamedTuple):
    """A checkpoint that has been read and checked."""

    snapshot: Snapshot
    random: Tensor


def whole_weights(model: AnyModel) -> dict[str, Tensor]:
    """All weights, unsharded, on the main process; all processes must call this."""
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
        folder: Folder of the run.
        model: Gives the configuration.
        snapshot: What to keep.
        run: What defines the run, as plain data (only the same run continues from here), and
            under ``environment`` where it ran.
        keep: Number of checkpoints to keep, including this one.

    Returns:
        Folder of the checkpoint.

    Raises:
        InputError: If it cannot be written; the older ones stay as they are.
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
        write_manifest(draft)

    path = folder / CHECKPOINTS / f"step-{snapshot.progress.steps:08}"
    write_folder(path, fill)
    for old in found(folder)[:-keep]:
        old.rename(old.with_name(f".{old.name}"))  # a half-removed folder is not a checkpoint
    for leftover in (folder / CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return path


def other_environment(path: Path, now: Mapping[str, str | int]) -> str:
    """How the machine or PyTorch differs from where a checkpoint was written, in words."""
    names = ("torch", "cpu", "threads", "device", "processes")
    try:
        then = read_json_object(path / RECORD, "record of the checkpoint")["environment"]
        return ", ".join(f"{n} {then[n]} then, {now[n]} now" for n in names if then[n] != now[n])
    except (ValueError, KeyError, TypeError):
        return ""  # ``read`` reports what is wrong


def read(path: Path, model: AnyModel, optimizer: torch.optim.Optimizer, wanted: Wanted) -> Snapshot:
    """Restore model, optimizer and random state from a checkpoint.

    The whole checkpoint is checked first: hashes, names, shapes, dtypes and ranges. Model and
    optimizer are not changed if it is damaged.

    Args:
        path: Folder of the checkpoint.
        model: A model of the same configuration.
        optimizer: Optimizer of the model.
        wanted: What the checkpoint must fit.

    Returns:
        What was kept; the carried state is that of the whole batch, on the model's device.

    Raises:
        InputError: If the checkpoint is damaged, with the newest older one that is whole; or if
            it is of another run.
    """
    try:
        contents = _checked(path, model, wanted)
    except _Damage as damage:
        raise InputError(
            f"the checkpoint {path} is damaged: {damage}; {_way_out(path, model, wanted)}"
        ) from damage
    snapshot = contents.snapshot
    optimizer.zero_grad()  # if gradients are left, PyTorch takes the state as initialised
    set_model_state_dict(model, {**snapshot.weights}, options=_WHOLE)
    _set_moments(model, optimizer, snapshot.moments)
    torch.set_rng_state(contents.random)
    device = next(model.parameters()).device
    carried = None if snapshot.carried is None else to(snapshot.carried, device=device)
    return snapshot._replace(carried=carried)


class _Damage(ValueError):
    """What is wrong with a checkpoint."""


def _way_out(path: Path, model: AnyModel, wanted: Wanted) -> str:
    """What to do about a damaged checkpoint."""
    for older in reversed(found(path.parents[1])):
        if older.name < path.name and _is_whole(older, model, wanted):
            return f"remove it to go on from {older.name}, which is whole"
    return "no older one is whole: remove all to begin again"


def _is_whole(path: Path, model: AnyModel, wanted: Wanted) -> bool:
    try:
        _checked(path, model, wanted)
    except (_Damage, InputError):
        return False
    return True


def _checked(path: Path, model: AnyModel, wanted: Wanted) -> _Contents:
    """Read a checkpoint and check all of it; nothing is changed.

    Raises:
        _Damage: If it is damaged.
        InputError: If it is of another run.
    """
    try:
        for name in FILES:
            regular_file(path / name, "file of the checkpoint")
        check_manifest(path, FILES)
        record = read_json_object(path / RECORD, "record of the checkpoint")
        before = {name: record[name] for name in wanted.run}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damage(_line(error)) from error
    now = json.loads(json.dumps(wanted.run))
    before = _filled(before, wanted.defaults)
    if _planned(before) <= _planned(now):  # a run may be continued for more steps
        now["train"]["steps"] = before["train"]["steps"]
    if different := _difference(before, now):
        raise InputError(
            f"{path} is of a run with another {different}: give the same, or choose another folder"
        )
    try:
        return _loaded(path, record["progress"], model, wanted)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _Damage(_line(error)) from error


def _planned(run: Any) -> float:
    """The planned number of updates, where it is recorded."""
    steps = run.get("train", {}).get("steps") if isinstance(run, dict) else None
    return steps if isinstance(steps, int) else math.inf


def _loaded(path: Path, progress: Any, model: AnyModel, wanted: Wanted) -> _Contents:
    done = checked_progress(path, progress, wanted.steps)
    weights, tensors = load_file(path / WEIGHTS), load_file(path / TENSORS)

    def template(capacity: int) -> Any:
        return model.init_state(1, capacity=capacity)

    carried = checked_carried(_below(tensors, "carried/"), template, wanted.rows)
    # After init_state, which gathers a sharded model's parameters; state_dict shards them again.
    check_tensors("weights", weights, model.state_dict())
    moments = _below(tensors, "moments/")
    optimizer = wanted.run["train"].get("optimizer", "adamw")
    check_moments(moments, dict(model.named_parameters()), done.steps, optimizer)
    check_random(tensors["random"])
    others = tensors.keys() - {"random"}
    if strange := [n for n in others if not n.startswith(("moments/", "carried/"))]:
        raise ValueError(f"{TENSORS} has {strange[0]!r}, which no checkpoint has")

    return _Contents(Snapshot(weights, moments, carried, done), tensors["random"])


def _line(error: BaseException) -> str:
    """An error in one line."""
    name = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(name.split())


def _set_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore the optimizer's state; learning rates and groups come from the configuration."""
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
