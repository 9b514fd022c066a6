"""``stateline evaluate RUN --task ...``: a trained model on a task, at any lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from stateline.errors import InputError

if TYPE_CHECKING:
    from stateline.models.factory import AnyModel
    from stateline.tasks import Task


def add_task_options(parser: ArgumentParser) -> None:
    """Add the options; if one of the first two is given, :func:`score_on_task` answers."""
    option = parser.add_argument
    option(
        "--task",
        type=str | None,
        default=None,
        help='a task that models are trained on, as "copying(max_len=40)"; own is the run\'s',
    )
    option("--lengths", nargs="+", type=int, default=[], help="of --task; by default its own")
    option("--batches", type=int, default=16, help="of --task: problems to solve, in batches")


def score_on_task(given: Namespace) -> dict[str, Any]:
    """Print the scores at each length.

    Returns:
        The scores, for the file of ``--out``.

    Raises:
        InputError: If the run or the task cannot be read, the model is of another kind or has
            another vocabulary, or a length cannot be used.
    """
    from stateline.devices import resolve_device, resolve_dtype
    from stateline.evaluate import evaluate
    from stateline.files import user_path
    from stateline.tasks import make_task

    folder = user_path(given.run, "model")
    if given.batches < 1 or min(given.lengths, default=1) < 1:
        raise InputError("batches and lengths must be at least 1")
    own, seed = _own_task(folder)
    spec = own if given.task in (None, "own") else given.task
    if not spec:
        raise InputError(f"{folder} does not say what its model was trained on: give --task")
    task = make_task(spec, seed=seed)
    model = _load(folder).to(resolve_device(given.device), resolve_dtype(given.dtype))
    _check_compatible(model, task, spec)
    batches = 0 if task.has_text else given.batches
    scores = {}
    for length in given.lengths or task.eval_lengths:
        _check_positions(model, task, length)
        scores[length] = evaluate(model, task, length, batches=batches)
    _print(task, scores)
    named = {str(length): own for length, own in scores.items()}
    return {"run": given.run, "task": spec, "batches": batches, "scores": named}


def _own_task(folder: Path) -> tuple[str, int]:
    """The task that a run was trained on, if its folder says so, and its seed."""
    from stateline.runs.folder import read_run

    home = folder.parents[1] if folder.absolute().parent.name == "checkpoints" else folder
    run = read_run(home)
    return ("", 0) if run is None else (run.task, run.seed)


def _load(folder: Path) -> "AnyModel":
    """The model of any kind in the folder of a run, a checkpoint or a published model."""
    from stateline.generate import load_run
    from stateline.generate.runs import find_model
    from stateline.models.checkpoint import load_any
    from stateline.models.convert.table import is_published

    home = find_model(folder)
    return load_run(home)[0] if is_published(home) else load_any(home)


def _check_compatible(model: "AnyModel", task: "Task", spec: str) -> None:
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
                "the tokens of that which the run was trained on"
            )


def _check_positions(model: "AnyModel", task: "Task", length: int) -> None:
    if model.max_len is not None and (needed := task.positions(length)) > model.max_len:
        raise InputError(
            f"length {length} takes {needed} positions, and the model has {model.max_len}: give "
            "shorter --lengths"
        )


def _print(task: "Task", scores: Mapping[int, Mapping[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    names = list(next(iter(scores.values())))
    for heading in ("length", *(name.replace("_", " ") for name in names)):
        table.add_column(heading, justify="right")
    for length, own in scores.items():
        trained = " (trained)" if length == task.train_length else ""
        table.add_row(f"{length:,}{trained}", *(f"{own[name]:.4f}" for name in names))
    Console().print(table)
