"""``stateline evaluate RUN --task ...``: a trained model on a task, at any lengths."""

from typing import Any

from jsonargparse import ArgumentParser, Namespace

from stateline.cli.console import plain_table


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
        InputError: See :func:`~stateline.runs.evaluate.evaluate_run`.
    """
    from rich.console import Console

    from stateline.devices import resolve_device, resolve_dtype
    from stateline.files import user_path
    from stateline.runs.evaluate import evaluate_run

    spec, task, batches, scores = evaluate_run(
        user_path(given.run, "model"),
        None if given.task == "own" else given.task,
        lengths=given.lengths,
        batches=given.batches,
        device=resolve_device(given.device),
        dtype=resolve_dtype(given.dtype),
    )
    names = list(next(iter(scores.values())))
    table = plain_table("length", *(name.replace("_", " ") for name in names))
    for length, own in scores.items():
        trained = " (trained)" if length == task.train_length else ""
        table.add_row(f"{length:,}{trained}", *(f"{own[name]:.4f}" for name in names))
    Console().print(table)
    named = {str(length): own for length, own in scores.items()}
    return {"run": given.run, "task": spec, "batches": batches, "scores": named}
