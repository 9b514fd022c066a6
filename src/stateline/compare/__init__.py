"""Compare architectures: choose settings for each, train it at the same size, score it, time it."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from stateline.bench.speed import Cell
from stateline.compare.comparison import Comparison, make_tasks, plan
from stateline.compare.engine import Engine, run_all
from stateline.compare.news import Deadline, News, TimeIsOver, together
from stateline.compare.pool import local
from stateline.compare.recipe import Recipe
from stateline.compare.sweep import Sweep, missing
from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.files import sole_writer
from stateline.runs.initial import check_tokenizer
from stateline.runs.job import Job, check_job
from stateline.runs.results import Results, RunRecord
from stateline.runs.speed import Detail, time_jobs
from stateline.runs.store import outline, write_results
from stateline.tasks import Task
from stateline.train.metrics import METRICS

__all__ = ["Comparison", "Job", "News", "Recipe", "Results", "compare", "plan"]


def compare(
    comparison: Comparison,
    folder: Path | str,
    *,
    command: str = "",
    workers: int | None = None,
    device: str = "auto",
    news: News | None = None,
    engine: Engine | None = None,
    timing: Detail = "short",
) -> Results:
    """Run a comparison, or the rest of an interrupted one.

    Each run and each trial has its own folder in ``folder / "runs"``. If its result is there, it is
    not run again. Workers train several models at a time, each on one thread. Speed is measured at
    the end, while nothing else runs.

    Args:
        comparison: What to compare.
        folder: Where everything is written.
        command: How to start the same comparison again, for the record.
        workers: Number of worker processes; 0 trains in this process, one model after the other.
            By default one per core, or one per GPU.
        device: Where to train and to measure: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        news: Called while the comparison runs.
        engine: Where jobs are trained; by default on this machine, as ``workers`` and ``device``
            say.
        timing: What is timed: ``short``, ``full`` (256 to 65,536 tokens, 1 and 64 rows; minutes)
            or ``none``.

    Returns:
        The content of ``folder / "results.json"``, which is also updated after each run. After the
        comparison's ``minutes`` it is what is there, and ``finished`` is false.

    Raises:
        InputError: If a pattern, task or setting cannot be used or the device does not exist
            (before anything is written), or the folder cannot be written to.
    """
    _check_not_in_worker()
    folder = Path(folder)
    engine, news = engine or local(device, workers), news or News()
    if comparison.minutes is not None:
        news = together([news, Deadline(comparison.minutes)])
    tasks = make_tasks(comparison)
    sweep = Sweep(comparison, plan(comparison, tasks), tasks)
    for job in sweep.jobs:
        if job.training.seed == 0:
            check_job(job, tasks[job.task])
    for task, init in dict.fromkeys((job.task, job.init) for job in sweep.jobs if job.init):
        check_tokenizer(tasks[task], init)
    if (folder / METRICS).exists():
        raise InputError(f"{folder} holds a run, not a comparison: choose another with --out")
    with sole_writer(folder):
        begun = replace(outline(sweep.jobs, tasks, command), protocol=sweep.protocol())
        done: dict[Job, RunRecord] = {}
        todo = missing(sweep, sweep.first(), folder, done)
        _update(begun, folder, sweep, done)  # fails now if the folder cannot be written to
        news.planned(sweep.count(), sweep.count() - len(todo) - sweep.later())
        for job in {job.label: job for job in todo if job.init}.values():
            news.initial(job)
        here = resolve_device(device)

        def then(job: Job, run: RunRecord) -> list[Job]:
            done[job] = run
            more = missing(sweep, sweep.after(job, run), folder, done)
            _update(begun, folder, sweep, done)
            return more

        try:
            run_all(engine, todo, tasks, folder, news, then)
        except TimeIsOver:
            return _update(begun, folder, sweep, done)
        results, timed = _update(begun, folder, sweep, done), _jobs_to_time(sweep.jobs, tasks)

        def tell(cell: Cell) -> None:
            size = f"length {cell.length:,}, batch {cell.batch}"
            news.timing(f"{len(timed)} models: {cell.phase}, {size}")

        speeds = time_jobs(timed, folder, here, timing, tell)
        news.timed(speeds)
        results = replace(results, speed=speeds, finished=True)
        write_results(folder, results)
        return results


def _check_not_in_worker() -> None:
    """Raise InputError if a worker that is starting imports a script without a main guard."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "compare() was called while a worker process imported the main script: put the call "
            'under if __name__ == "__main__":'
        )


def _update(results: Results, folder: Path, sweep: Sweep, done: dict[Job, RunRecord]) -> Results:
    """The results with all finished runs and trials; also writes them."""
    runs = [
        replace(done[job], model=job.label, family=job.family, size=job.size, own_size=job.own_size)
        for job in sweep.jobs
        if job in done
    ]
    results = replace(results, runs=runs, trials=sweep.records())
    write_results(folder, results)
    return results


def _jobs_to_time(jobs: Sequence[Job], tasks: dict[str, Task]) -> list[Job]:
    """One job per model: of the first task on text if there is one, else of the first task."""
    specs = dict.fromkeys(job.task for job in jobs)
    task = next((spec for spec in specs if tasks[spec].has_text), jobs[0].task)
    return [job for job in jobs if job.task == task and job.training.seed == 0]
