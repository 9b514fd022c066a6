"""What a comparison will cost, before it runs: runs, memory, and minutes from a few updates."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from stateline.bench.timing import use_threads
from stateline.compare.comparison import Comparison, make_tasks, plan
from stateline.compare.sweep import Sweep, missing
from stateline.models.factory import make_model
from stateline.runs.job import Job, check_job, training_costs
from stateline.runs.results import RunRecord
from stateline.tasks import Task
from stateline.train.loop import train

MEASURED = 3
"""Updates that are timed, after one that compiles kernels."""


class Forecast(NamedTuple):
    """The cost of one model on one task.

    Attributes:
        model: Its name.
        task: Spec of the task.
        runs: Scored runs, at most.
        trials: Trials to choose its settings; 0 if nothing is tried.
        done: Runs and trials that are there already.
        memory: Estimated bytes of one run.
        seconds: Time for the updates that are missing, at most; scoring comes on top.
    """

    model: str
    task: str
    runs: int
    trials: int
    done: int
    memory: int
    seconds: float


def forecast(comparison: Comparison, folder: Path) -> list[Forecast]:
    """The cost of each model on each task, without what is in a folder already.

    Args:
        comparison: What to compare.
        folder: Folder of the comparison; it is not changed, and need not exist.

    Raises:
        InputError: If a pattern, task or setting cannot be used.
    """
    tasks = make_tasks(comparison)
    jobs = plan(comparison, tasks)
    sweep = Sweep(comparison, jobs, tasks)
    done: dict[Job, RunRecord] = {}
    missing(sweep, sweep.first(), folder, done)
    firsts = {(job.label, job.task): job for job in reversed(jobs)}
    return [_forecast(job, sweep, tasks, done) for job in reversed(firsts.values())]


def _forecast(
    job: Job, sweep: Sweep, tasks: Mapping[str, Task], done: Mapping[Job, RunRecord]
) -> Forecast:
    task = tasks[job.task]
    check_job(job, task)
    runs = sum((own.label, own.task) == (job.label, job.task) for own in sweep.jobs)
    trials, updates = sweep.trials(job)
    there = [
        (own, run) for own, run in done.items() if (own.label, own.task) == (job.label, job.task)
    ]
    left = updates + runs * job.training.steps - sum(run.steps for _, run in there)
    return Forecast(
        job.label,
        job.task,
        runs,
        trials,
        len(there),
        sum(training_costs(job, task).memory.values()),
        max(0, left) * seconds_per_update(job, task),
    )


def seconds_per_update(job: Job, task: Task) -> float:
    """Seconds of an update on one thread of this machine, without the first."""
    few = replace(
        job.training, eval_every=0, stop_at=None, keep_best=False, patience=None, best_length=None
    )
    with use_threads(1):
        torch.manual_seed(0)
        model = make_model(job.model)
        train(model, task, replace(few, steps=1))
        return train(model, task, replace(few, steps=MEASURED)).seconds / MEASURED
