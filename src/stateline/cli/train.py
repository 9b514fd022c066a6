"""Train one architecture on one task, and keep the model, its metrics and its result.

RECIPE is a YAML file with the options below, a pattern, the name of a published model, such as
h3-125m, or the folder of a model to start from (as with --init). Options on the command line
override it. Under torchrun, processes share each batch.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from stateline.cli.console import announce, begin, caught_signals
from stateline.cli.options import add_device, add_tracker
from stateline.cli.parser import Parser
from stateline.cli.recipe import add_settings, read_recipe
from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.plugins import command_line
from stateline.reports.format import count, short_bytes, short_number
from stateline.runs.folder import check_imports
from stateline.settings import at_least, check_keywords
from stateline.train.config import TrainConfig

if TYPE_CHECKING:
    from stateline.runs.job import Job, TrainingCosts
    from stateline.runs.results import RunRecord


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument("recipe", 'a YAML file, a pattern such as "h3*2", a preset, or a folder')
    option, switch = parser.option, parser.switch
    option(
        "pattern", str, None, "pattern in place of that of the recipe or of the model to start from"
    )
    about = "with a YAML file: folder of a model, also a published one, to start from"
    option("init", str, None, about)
    option("task", str, "text", 'for example "text(path=books)"')
    option("out", str, "runs/train", "folder for the run")
    add_settings(parser)
    about = "continue from the newest checkpoint in the folder, also for more --train.steps"
    switch("resume", about)
    switch("dry_run", "show size, operations and memory; train nothing")
    switch("print_config", "print the whole recipe; train nothing")
    option("threads", int, None, "threads on the CPU; by default all cores")
    add_device(parser)
    add_tracker(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Train, score, save."""
    given = parser.parse_args(arguments)
    main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started
    if main and not (given.dry_run or given.print_config):
        begin(f"training {given.recipe}")
    if not main:
        logging.getLogger("stateline").setLevel(logging.WARNING)  # the main process tells the rest
    given = read_recipe(arguments, parser)
    if given.resume:
        check_imports(Path(given.out))
        chosen = parser.parse_args(arguments, defaults=False).get("out")
        _check_resumed(Path(given.recipe), Path(given.out), chosen=chosen is not None)

    import torch

    from stateline.cli.progress import print_metrics
    from stateline.compare.recipe import OF_A_RECIPE
    from stateline.compare.trackers import tracked
    from stateline.runs.job import training_costs
    from stateline.runs.single import run_single, single_job
    from stateline.tasks import make_task
    from stateline.train.metrics import COMPLETE
    from stateline.train.processes import join_processes

    task = make_task(given.task)
    check_keywords(f"the training of {given.task}", TrainConfig, task.training)
    parser.set_defaults({f"train.{name}": value for name, value in task.training.items()})
    given = read_recipe(arguments, parser)
    resolved = Namespace({name: given[name] for name in OF_A_RECIPE})
    recipe = parser.dump(resolved, skip_unset=False, skip_validation=True)
    if given.print_config:
        print(recipe if main else "", end="")
        return 0
    training = TrainConfig(**given.train.as_dict())
    settings = {"model": given.model.as_dict(), "training": training, "init": given.init or ""}
    job = single_job(task, given.task, given.pattern, **settings)
    if given.dry_run:
        print(_costs(job, training_costs(job, task)) if main else "", end="")
        return 0
    at_least(1, threads=given.threads)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    observers, folder = tracked(given.tracker), Path(given.out)
    with join_processes(given.device) as processes, caught_signals() as caught:
        with print_metrics(job, folder, quiet=not processes.main, observers=observers) as show:
            result = run_single(
                job,
                folder,
                task=task,
                resume=given.resume,
                recipe=recipe,
                command=command_line("train", [a for a in arguments if a != "--resume"]),
                processes=processes,
                on_log=show,
                interrupted=lambda: bool(caught),
                tell=announce,
            )
        for observer in observers if processes.main and result.stopped in COMPLETE else ():
            observer.finished(job, result)
    if processes.main:  # here, or the others would take an error for a lost connection
        _print_result(job, result, folder)
    ends = {"interrupted": 128 + (caught or [SIGTERM])[0]} | dict.fromkeys(COMPLETE, 0)
    return ends.get(result.stopped, 2)


def _check_resumed(start: Path, folder: Path, *, chosen: bool) -> None:
    """Raise InputError if ``--resume`` comes with a run in the place of a model to start from."""
    from stateline.train.folder import found

    if not chosen and found(start) and not found(folder):
        raise InputError(
            f"there is no run in {folder} to resume: to continue the run in {start}, train "
            f"{start / 'config.yaml'}; to start a new run from its weights, leave out --resume"
        )


def _costs(job: "Job", costs: "TrainingCosts") -> str:
    """Size, operations and memory, as lines."""
    steps, per_update = job.training.steps, costs.flops_per_update
    total, in_all = short_bytes(sum(costs.memory.values())), short_number(per_update * steps)
    of_update = f"{short_number(per_update)} an update, {in_all} in {steps:,} updates"
    parts = [f"    {name:<13} {short_bytes(size)}" for name, size in costs.memory.items()]
    lines = [
        f"{job.model.pattern} on {job.task}: d_model {job.model.d_model}",
        f"  parameters      {costs.parameters:,}",
        f"  an update       {costs.rows} x {costs.length} tokens",
        f"  operations      {of_update}",
        f"  memory          {total}, estimated for one process in {job.training.precision}",
        *parts,
        f"  state of a row  {short_bytes(costs.state_bytes)} after {costs.length} tokens",
    ]
    return "\n".join(lines) + "\n"


def _print_result(job: "Job", result: "RunRecord", folder: Path) -> None:
    from stateline.train.metrics import COMPLETE

    pattern = job.model.pattern
    if result.stopped == "interrupted":
        steps = count(result.steps, "step")
        print(f"{pattern}: stopped and saved after {steps}; continue with --resume")
        return
    if result.stopped not in COMPLETE:
        raise InputError(result.stopped)
    print(f"{pattern}: {result.parameters:,} parameters, {result.stopped}")
    for length, scores in result.by_length.items():
        known = {name: value for name, value in scores.items() if value is not None}
        print(f"  at length {length}: {', '.join(f'{n} {v:.4g}' for n, v in known.items())}")
    generates = type(job.model) is ModelConfig  # a classifier does not
    further = f": {command_line('generate', [str(folder)])}" if generates else ""
    print(f"the model is in {folder}{further}")
