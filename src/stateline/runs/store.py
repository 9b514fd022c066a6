"""Writing results, and checking before a run begins that they can be written."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stateline.files import check_writable, sole_writer, write_text
from stateline.models.checkpoint import CONFIG, WEIGHTS
from stateline.pattern import parse_pattern
from stateline.plugins import imported
from stateline.runs.folder import IMPORTS, RESULT, RESULTS, recorded_imports
from stateline.runs.job import Job
from stateline.runs.results import FORMAT, Results, RunRecord, TaskRecord, to_json
from stateline.runs.score import EVAL_BATCHES
from stateline.runs.speed import described
from stateline.tasks import Task
from stateline.train.environment import environment
from stateline.train.folder import check_run_folder, found
from stateline.train.processes import Processes


def outline(jobs: Sequence[Job], tasks: Mapping[str, Task], command: str) -> Results:
    """Results without any run or timing, with the state size and operations of the models.

    Args:
        jobs: The jobs whose results they will hold.
        tasks: The tasks of all jobs, by spec.
        command: How to run the jobs again.
    """
    labels = list(dict.fromkeys(job.label for job in jobs))
    models = {job.label: job for job in reversed(jobs)}  # the first job of each
    return Results(
        format=FORMAT,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        finished=False,
        environment={**environment()},
        models=labels,
        tasks=[describe_task(spec, tasks[spec]) for spec in dict.fromkeys(j.task for j in jobs)],
        runs=[],
        speed=[described(models[label]) for label in labels],
    )


def describe_task(spec: str, task: Task) -> TaskRecord:
    """The description of a task in results."""
    name, shares = parse_pattern(spec)[0].name, task.scores_share
    return TaskRecord(
        spec=spec,
        name=name,
        title=task.title or name,
        about=task.about,
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        solved_at=task.solved_at,
        train_length=task.train_length,
        eval_lengths=list(task.eval_lengths),
        data=json.loads(json.dumps({**task.describe()})),  # lists for tuples, as in the file
        baselines={**task.baselines()},
        problems=task.problems_scored(EVAL_BATCHES) if shares else 0,
        chance=task.chance() if shares else None,
    )


def write_results(folder: Path, results: Results) -> None:
    """Write ``results.json``."""
    write_text(folder / RESULTS, to_json(results, indent=1))


def write_single(job: Job, task: Task, run: RunRecord, folder: Path, command: str) -> None:
    """Write ``results.json`` of one training run, in the form of a comparison of one model."""
    results = outline([job], {job.task: task}, command)
    write_results(folder, msgspec.structs.replace(results, runs=[run], finished=True))


def record_imports(folder: Path) -> None:
    """Record the code that was imported."""
    if imported() and recorded_imports(folder) != list(imported()):
        write_text(folder / IMPORTS, json.dumps(list(imported())) + "\n")


@contextmanager
def writing(folder: Path, processes: Processes) -> Iterator[None]:
    """Lock a run's folder; remove new files if the run fails before a first checkpoint or result.

    Raises:
        InputError: If a file cannot be written, or another process writes the run.
    """
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(_writing(folder)))
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    check_run_folder(folder)
    for name in (RESULT, CONFIG, WEIGHTS):
        check_writable(folder / name)
    with sole_writer(folder):
        before = set(folder.iterdir())  # not before the lock: it may be another process's run
        try:
            yield
        except Exception:
            if not found(folder) and not (folder / RESULT).exists():
                for path in set(folder.iterdir()) - before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise
