"""Writing results, and finding out before a run begins that they cannot be written."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stateline.files import check_writable, write_text
from stateline.models.checkpoint import CONFIG, WEIGHTS
from stateline.models.pattern import parse_pattern
from stateline.plugins import imported
from stateline.runs.folder import IMPORTS, RESULT, RESULTS, recorded_imports
from stateline.runs.job import Job
from stateline.runs.results import FORMAT, Results, RunRecord, TaskRecord, to_json
from stateline.runs.score import EVAL_BATCHES
from stateline.tasks import Task
from stateline.train.environment import environment
from stateline.train.folder import check_run_folder, found


def outline(jobs: Sequence[Job], tasks: Mapping[str, Task], command: str) -> Results:
    """Results without any run.

    Args:
        jobs: The jobs whose results they shall hold.
        tasks: The tasks of all jobs, by spec.
        command: How to run the jobs again.
    """
    return Results(
        format=FORMAT,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        finished=False,
        environment={**environment()},
        models=list(dict.fromkeys(job.label for job in jobs)),
        tasks=[describe_task(spec, tasks[spec]) for spec in dict.fromkeys(j.task for j in jobs)],
        runs=[],
        speed=[],
    )


def describe_task(spec: str, task: Task) -> TaskRecord:
    """What results say of a task."""
    name = parse_pattern(spec)[0].name
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
        problems=task.problems_scored(EVAL_BATCHES) if task.metric.endswith("accuracy") else 0,
    )


def write_results(folder: Path, results: Results) -> None:
    """Write ``results.json``."""
    write_text(folder / RESULTS, to_json(results, indent=1))


def write_single(job: Job, task: Task, run: RunRecord, folder: Path, command: str) -> None:
    """Write ``results.json`` of a single training run, like that of a comparison of one model."""
    results = outline([job], {job.task: task}, command)
    write_results(folder, msgspec.structs.replace(results, runs=[run], finished=True))


def prepare_run(folder: Path) -> None:
    """Check that all files of a run can be written, and record the code that was imported.

    Raises:
        InputError: If a file cannot be written.
    """
    check_run_folder(folder)
    for name in (RESULT, CONFIG, WEIGHTS):
        check_writable(folder / name)
    if imported() and recorded_imports(folder) != list(imported()):
        write_text(folder / IMPORTS, json.dumps(list(imported())) + "\n")


@contextmanager
def nothing_half_made(folder: Path) -> Iterator[None]:
    """If a run fails before its first checkpoint or result, remove the files that it has made."""
    existed = folder.exists()
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        yield
    except Exception:
        if not found(folder) and not (folder / RESULT).exists() and folder.is_dir():
            for path in set(folder.iterdir()) - before:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
        raise
