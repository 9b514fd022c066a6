"""Running the missing jobs of a table."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stateline.compare.engine import Engine, run_all
from stateline.compare.news import News
from stateline.errors import InputError
from stateline.files import write_text
from stateline.generate.runs import read_model_config
from stateline.models.config import ModelConfig
from stateline.pattern import canonical_pattern
from stateline.runs.folder import RESULT, RESULTS, SPEED, read_results, read_run, stored_run
from stateline.runs.job import Job, check_job
from stateline.runs.results import RunRecord, to_json
from stateline.tasks import Task
from stateline.train.config import TrainConfig


def stored_runs(jobs: Sequence[Job], folder: Path) -> dict[Job, RunRecord]:
    """The results of the jobs that have already been run in ``folder / "runs"``."""
    found = {job: stored_run(folder / "runs" / job.name) for job in dict.fromkeys(jobs)}
    return {job: run for job, run in found.items() if run is not None}


def matching_runs(jobs: Sequence[Job], folders: Sequence[Path]) -> dict[Job, RunRecord]:
    """Finished runs in other folders, such as runs of ``stateline train``.

    A run belongs to a job if both have the same task, data, model and training, with the same seed.
    """
    found: dict[Job, RunRecord] = {}
    for run, config, data in _finished(folders):
        for job in jobs:
            if job not in found and _same(job, run, config, data):
                found[job] = run
    return found


def keep_runs(runs: Mapping[Job, RunRecord], folder: Path) -> None:
    """Write results to where :func:`stored_runs` finds them."""
    for job, run in runs.items():
        write_text(folder / "runs" / job.name / RESULT, to_json(run))


def run_jobs(
    jobs: Sequence[Job],
    tasks: Mapping[str, Task],
    folder: Path,
    done: Mapping[Job, RunRecord],
    engine: Engine,
    news: News,
) -> dict[Job, RunRecord]:
    """Train the jobs that are not done yet, each once; the folder is that of all tables."""
    todo, found = [job for job in dict.fromkeys(jobs) if job not in done], dict(done)
    for job in todo:
        check_job(job, tasks[job.task])
    news.planned(len(done) + len(todo), len(done))

    def then(job: Job, run: RunRecord) -> tuple[Job, ...]:
        found[job] = run
        return ()

    run_all(engine, todo, tasks, folder, news, then)
    return found


def _finished(folders: Sequence[Path]) -> Iterator[tuple[RunRecord, ModelConfig, str]]:
    """The finished runs in some folders: result, model and hash of the data."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no folder {folder}: --from takes folders that hold finished runs")
        for path in sorted(folder.rglob(RESULT)):
            if path.parents[1].name == SPEED:  # times of a comparison
                continue
            run = read_run(path.parent)
            if run is None or not run.by_length:  # a trial
                continue
            data = ""
            if (path.parent / RESULTS).exists():
                data = str(read_results(path.parent).tasks[0].data.get("sha256", ""))
            yield run, read_model_config(path.parent), data


def _same(job: Job, run: RunRecord, config: ModelConfig, data: str) -> bool:
    pattern = canonical_pattern(config.pattern)
    return (
        canonical_pattern(run.task) == job.task
        and data == job.data
        and dataclasses.replace(config, pattern=pattern) == job.model
        and _training(TrainConfig(**run.training)) == _training(job.training)
    )


def _training(training: TrainConfig) -> TrainConfig:
    """A training configuration without settings that do not change its outcome."""
    plain, names = TrainConfig(), ("log_every", "save_every", "keep")
    return dataclasses.replace(training, **{name: getattr(plain, name) for name in names})
