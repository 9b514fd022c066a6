"""Train one architecture on one task, and keep the model, its metrics and its result.

RECIPE is a YAML file with the options below, a pattern, the name of a published model, such as
h3-125m, or the folder of a model whose training is to go on (as with --init). Options on the
command line override it. Under ``torchrun``, processes share each batch.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM, signal
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from stateline.cli.console import announce, begin
from stateline.cli.engine import add_tracker_option, trackers
from stateline.cli.recipe import add_settings, read_recipe
from stateline.devices import add_device_option
from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.plugins import command_line
from stateline.runs.folder import check_imports
from stateline.train.config import TrainConfig

if TYPE_CHECKING:
    from stateline.compare.news import News
    from stateline.runs.costs import TrainingCosts
    from stateline.runs.job import Job
    from stateline.runs.results import RunRecord
    from stateline.tasks import Task

NOT_OF_THE_RECIPE = (
    *("recipe", "resume", "dry_run", "print_config", "device", "import", "tracker", "threads"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "recipe", type=str, help='a YAML file, a pattern such as "attention h3*2", or a preset'
    )
    parser.add_argument("--pattern", type=str | None, default=None, help="in place of the recipe's")
    parser.add_argument(
        "--init",
        type=str | None,
        default=None,
        help="folder of a model, of any kind or published, whose layers and weights the run takes",
    )
    parser.add_argument("--task", type=str, default="text", help='for example "text(path=books)"')
    parser.add_argument("--out", type=str, default="runs/train", help="folder for the run")
    add_settings(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in the folder, also for more --train.steps",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="show size, operations and memory; train nothing"
    )
    parser.add_argument(
        "--print_config", action="store_true", help="print the whole recipe; train nothing"
    )
    parser.add_argument(
        "--threads", type=int | None, default=None, help="threads on the CPU; by default all cores"
    )
    add_device_option(parser)
    add_tracker_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Train, score, save."""
    given = parser.parse_args(arguments)
    main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started
    if main and not (given.dry_run or given.print_config):
        begin(f"training {given.recipe}")
    given = read_recipe(arguments, parser)
    if given.resume:
        check_imports(Path(given.out))

    from stateline.runs.costs import training_costs
    from stateline.runs.single import single_job
    from stateline.tasks import make_task

    task = make_task(given.task)
    parser.set_defaults({f"train.{name}": value for name, value in task.training.items()})
    given = read_recipe(arguments, parser)
    resolved = given.clone()
    for name in NOT_OF_THE_RECIPE:
        resolved.pop(name, None)
    recipe = parser.dump(resolved, skip_unset=False, skip_validation=True)
    if given.print_config:
        print(recipe, end="")
        return 0
    training = TrainConfig(**given.train.as_dict())
    settings = {"model": given.model.as_dict(), "training": training, "init": given.init or ""}
    job = single_job(task, given.task, given.pattern, **settings)
    if given.dry_run:
        _print_costs(job, training_costs(job, task))
        return 0
    command = command_line("train", [a for a in arguments if a != "--resume"])
    _use_threads(given.threads)
    options = (given.resume, given.device, trackers(given.tracker))
    return _train(job, task, Path(given.out), recipe, command, *options)


def _train(
    job: "Job",
    task: "Task",
    folder: Path,
    recipe: str,
    command: str,
    resume: bool,
    device: str,
    observers: "Sequence[News]",
) -> int:
    """Train in this process and the others that torchrun started; return the exit code."""
    from stateline.cli.progress import print_metrics
    from stateline.runs.single import run_single
    from stateline.train.processes import join_processes

    with join_processes(device) as processes, _signals() as caught:
        with print_metrics(job, folder, quiet=not processes.main, observers=observers) as show:
            result = run_single(
                job,
                folder,
                task=task,
                resume=resume,
                recipe=recipe,
                command=command,
                processes=processes,
                on_log=show,
                interrupted=lambda: bool(caught),
                tell=announce,
            )
        if processes.main and result.stopped in ("finished", "solved"):
            for observer in observers:
                observer.finished(job, result)
        if processes.main:
            _print_result(job, result, folder)
    return 128 + (caught or [SIGTERM])[0] if result.stopped == "interrupted" else 0


def _use_threads(count: int | None) -> None:
    """Compute on a number of threads; ``None`` leaves it to PyTorch."""
    import torch

    if count is not None and count < 1:
        raise InputError(f"threads must be at least 1, got {count}")
    if count is not None:
        torch.set_num_threads(count)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the run can save and stop; a second SIGINT ends it."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if caught and number == SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal(number, note) for number in (SIGINT, SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal(number, handler)


def _print_costs(job: "Job", costs: "TrainingCosts") -> None:
    from stateline.reports.format import short_bytes, short_number

    steps, per_update = job.training.steps, costs.flops_per_update
    print(f"{job.model.pattern} on {job.task}: d_model {job.model.d_model}")
    print(f"  parameters      {costs.parameters:,}")
    print(f"  an update       {costs.rows} x {costs.length} tokens")
    print(
        f"  operations      {short_number(per_update)} an update, "
        f"{short_number(per_update * steps)} in {steps:,} updates"
    )
    total = short_bytes(sum(costs.memory.values()))
    print(f"  memory          {total}, estimated in float32 for one process")
    for name, size in costs.memory.items():
        print(f"    {name:<13} {short_bytes(size)}")
    print(f"  state of a row  {short_bytes(costs.state_bytes)} after {costs.length} tokens")


def _print_result(job: "Job", result: "RunRecord", folder: Path) -> None:
    pattern = job.model.pattern
    if result.stopped == "interrupted":
        print(f"{pattern}: stopped and saved after {result.steps} steps; continue with --resume")
        return
    if result.stopped not in ("finished", "solved"):
        raise InputError(result.stopped)
    print(f"{pattern}: {result.parameters:,} parameters, {result.stopped}")
    for length, scores in result.by_length.items():
        shown = ", ".join(
            f"{name} {value:.4g}" for name, value in scores.items() if value is not None
        )
        print(f"  at length {length}: {shown}")
    generates = type(job.model) is ModelConfig  # a classifier does not
    print(f"the model is in {folder}" + (f": stateline generate {folder}" if generates else ""))
