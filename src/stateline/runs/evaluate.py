"""Scoring a trained model on the task that it was trained on, or on another task."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.generate.runs import load_any_run
from stateline.models.factory import AnyModel
from stateline.runs.folder import read_run, run_of
from stateline.tasks import Task, make_task


class Evaluated(NamedTuple):
    """Scores of a trained model on a task.

    Attributes:
        spec: The task with its keywords, such as ``copying(max_len=15)``.
        task: The task.
        batches: Batches of problems behind each score; 0 for all held-out data.
        scores: Scores by length.
    """

    spec: str
    task: Task
    batches: int
    scores: dict[int, dict[str, float]]


def evaluate_run(
    folder: Path | str,
    spec: str | None = None,
    *,
    lengths: Sequence[int] = (),
    batches: int = 16,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Evaluated:
    """Score the model of a run, a checkpoint or a published model on fresh problems of a task.

    Args:
        folder: Folder of the model.
        spec: The task; by default the task of the run.
        lengths: Lengths in the task's unit; by default the task's own.
        batches: Batches of problems; a text is read to its end.
        device: Device of the model.
        dtype: Precision of the weights; by default that in which they were saved.

    Raises:
        InputError: If the run or the task cannot be read, the model is of another kind or has
            another vocabulary, or a length cannot be used.
    """
    folder = Path(folder)
    if batches < 1 or min(lengths, default=1) < 1:
        raise InputError("batches and lengths must be at least 1")
    spec, task = task_of_run(folder, spec)
    model = load_any_run(folder, device=device, dtype=dtype)
    _check_compatible(model, task, spec)
    batches, scores = 0 if task.has_text else batches, {}
    for length in lengths or task.eval_lengths:
        _check_positions(model, task, length)
        scores[length] = evaluate(model, task, length, batches=batches)
    return Evaluated(spec, task, batches, scores)


def task_of_run(folder: Path, spec: str | None = None) -> tuple[str, Task]:
    """A task with the seed of a run; by default the task on which the run was trained.

    Raises:
        InputError: If the task cannot be used, or the folder does not say what it is.
    """
    run = read_run(run_of(folder))
    spec = spec or (run.task if run else None)
    if spec is None:
        raise InputError(f"{folder} does not record its task: name a task with --task")
    return spec, make_task(spec, seed=run.seed if run else 0)


def _check_compatible(model: AnyModel, task: Task, spec: str) -> None:
    wanted, config = task.model_config(model.config.pattern, {}), model.config
    if wanted.kind != config.kind:
        raise InputError(
            f"{spec} needs a {wanted.kind.replace('_', ' ')}, and the run is a "
            f"{config.kind.replace('_', ' ')}: give another task"
        )
    for name in ("vocab_size", "n_channels", "n_outputs"):
        needed, has = (getattr(c, name, None) for c in (wanted, config))
        larger = needed is not None and has is not None and needed > has
        if larger or (name == "n_channels" and needed != has):
            raise InputError(
                f"{spec} needs a model of {name} {needed}, and the run has {has}: give a task with "
                "the same tokens as the task of the run"
            )


def _check_positions(model: AnyModel, task: Task, length: int) -> None:
    if model.max_len is not None and (needed := task.positions(length)) > model.max_len:
        raise InputError(
            f"length {length} takes {needed} positions, and the model has {model.max_len}: give "
            "shorter --lengths"
        )
