"""Whether a checkpoint is of the run that is to continue, and whether all processes train one run.

Settings are compared as plain data.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.tasks.base import Task
from stateline.train.config import TrainConfig

FREE = (
    "save_every",
    "keep",
    "parallel",
    "shard",
    "compile",
    "checkpoint_activations",
    "loss_chunk",
    "teacher_outputs",
)
"""Settings that may change when a run continues: they affect what it learns only by rounding."""


def identity(task: Task, model: ModelConfig) -> dict[str, Any]:
    """What defines a run whose caller does not say it: its model, and its first training batch.

    Tasks of other kinds, settings, seeds or data have another first batch.
    """
    digest = hashlib.sha256()
    for tensor in task.train_batch(0):
        digest.update(tensor.contiguous().numpy(force=True).tobytes())
    return {"task": f"{type(task).__name__} {digest.hexdigest()[:10]}", "model": asdict(model)}


def settings_that_count(config: TrainConfig) -> dict[str, Any]:
    """The settings that must be the same when a run continues."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def difference(record: Mapping[str, Any], defined_by: Mapping[str, Any]) -> str:
    """The first setting that differs in a checkpoint's record, in words; empty if none does.

    A run may be continued for more steps.

    Args:
        record: The record.
        defined_by: What defines the run, as plain data.

    Raises:
        KeyError: If the record lacks what defines the run.
    """
    before = {name: record[name] for name in defined_by}
    now = json.loads(json.dumps(defined_by))
    if _planned(before) <= _planned(now):
        now["train"]["steps"] = before["train"]["steps"]
    return _difference(before, now)


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Check that all processes were given the same run.

    Otherwise their copies of the model drift apart, or one waits for another that has ended.

    Args:
        runs: What defines the run in each process, as plain data.

    Raises:
        InputError: If one has another run than the first one.
    """
    for rank, other in enumerate(runs):
        if text := _difference(runs[0], other, "run", ("in process 0", f"in process {rank}")):
            raise InputError(
                f"the processes must train the same run, and they differ in {text}: give all the "
                "same settings, data and folder"
            )


def _planned(run: Any) -> float:
    """The planned number of updates, where it is recorded."""
    train = run.get("train") if isinstance(run, dict) else None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else math.inf


def _difference(
    before: Any, now: Any, name: str = "run", words: tuple[str, str] = ("then", "now")
) -> str:
    """The first difference between two trees of plain data, in words; empty if they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            if text := _difference(before.get(key), now.get(key), key, words):
                return text
        return ""
    return "" if before == now else f"{name} ({before} {words[0]}, {now} {words[1]})"
