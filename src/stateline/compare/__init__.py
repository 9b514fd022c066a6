"""Compare architectures: train each at the same size on each task, score it, then time it."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stateline.compare.jobs import Comparison, Job, plan
from stateline.compare.pool import News, train_all
from stateline.compare.run import Results, check_job, run_job, stored, time_job
from stateline.errors import InputError
from stateline.files import write_text
from stateline.models.pattern import parse_pattern
from stateline.tasks import CorpusTask, Task, make_task
from stateline.train.environment import environment
from stateline.workers import cores

__all__ = [
    "Comparison",
    "Job",
    "News",
    "Results",
    "check_job",
    "compare",
    "plan",
    "record_run",
    "run_job",
]

FORMAT = "stateline-results-1"


def compare(
    comparison: Comparison,
    folder: Path,
    *,
    command: str,
    workers: int | None = None,
    news: News | None = None,
) -> Results:
    """Run a comparison, or what is left of it.

    Each run has its own folder below ``folder / "runs"``; one whose result lies there is not run
    again. Training runs share the cores, one thread each or more; speed is measured alone and last.

    Args:
        comparison: What to compare.
        folder: Where everything is written.
        command: How a person starts the same comparison, for the record.
        workers: Training runs at a time; by default one per core.
        news: Told what happens.

    Returns:
        The content of ``folder / "results.json"``, which is also brought up to date after each run.

    Raises:
        InputError: If a pattern, task or setting cannot be used (before anything is written), or
            the folder cannot be written to.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    news = news or News()
    jobs = plan(comparison)
    tasks = {spec: make_task(spec) for spec in dict.fromkeys(job.task for job in jobs)}
    for job in jobs:
        if job.training.seed == 0:
            check_job(job, tasks[job.task])
    results = _outline(jobs, command)
    finished = {job: run for job in jobs if (run := stored(folder / "runs" / job.name))}

    def record() -> None:
        results["runs"] = [finished[job] for job in jobs if job in finished]
        _write(folder, results)

    record()  # a folder that cannot be written to shows now
    news.planned(jobs, len(finished))
    pending = [job for job in jobs if job not in finished]
    for job, run in train_all(pending, folder, workers or cores(), news):
        finished[job] = run
        record()
        news.finished(job, run)
    for job in _jobs_to_time(jobs):
        news.timing(job.model.pattern)
        results["speed"].append(time_job(job, folder))
        _write(folder, results)
    results["finished"] = True
    _write(folder, results)
    return results


def record_run(job: Job, run: Results, folder: Path, *, command: str) -> None:
    """Write ``results.json`` of a single training run, as a comparison of one."""
    _write(folder, {**_outline([job], command), "runs": [run], "finished": True})


def _jobs_to_time(jobs: Sequence[Job]) -> list[Job]:
    """One job per pattern, of the first task on text if there is one, else of the first task."""
    specs = dict.fromkeys(job.task for job in jobs)
    task = next((s for s in specs if isinstance(make_task(s), CorpusTask)), jobs[0].task)
    return [job for job in jobs if job.task == task and job.training.seed == 0]


def _outline(jobs: Sequence[Job], command: str) -> Results:
    """Results without any run."""
    specs = dict.fromkeys(job.task for job in jobs)
    return {
        "format": FORMAT,
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": False,
        "environment": environment(),
        "models": list(dict.fromkeys(job.model.pattern for job in jobs)),
        "tasks": [_describe(spec, make_task(spec)) for spec in specs],
        "runs": [],
        "speed": [],
    }


def _describe(spec: str, task: Task) -> Results:
    return {
        "spec": spec,
        "name": parse_pattern(spec)[0].name,
        "title": task.title,
        "about": task.about,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "solved_at": task.solved_at,
        "train_length": task.train_length,
        "eval_lengths": list(task.eval_lengths),
        "data": task.describe(),
        "baselines": task.baselines() if isinstance(task, CorpusTask) else {},
    }


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
