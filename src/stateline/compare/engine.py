"""Where the jobs of a comparison are trained: what every engine offers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from stateline.compare.news import News
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.tasks import Task


@runtime_checkable
class Running(Protocol):
    """An engine at work."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add jobs; they are begun in this order, as soon as there is room."""

    def finished(self) -> Iterator[tuple[Job, RunRecord]]:
        """Each submitted job with its result as soon as it is done, until none is left.

        More jobs may be submitted meanwhile. A later call yields jobs submitted after the last.

        Raises:
            InputError: If a job cannot be run, or its process was lost.
        """


@runtime_checkable
class Engine(Protocol):
    """Trains jobs: in this process, in worker processes, or on a cluster.

    An engine only decides where a job runs. The results are the same for all engines.
    """

    def open(
        self, folder: Path, tasks: Mapping[str, Task], news: News
    ) -> AbstractContextManager[Running]:
        """Get ready for jobs; nothing is started before the first is submitted.

        Args:
            folder: Folder of the comparison; the job ``name`` runs in ``runs/name``.
            tasks: Tasks that have been constructed already, with seed 0, by spec.
            news: Called while jobs run.
        """


def run_all(
    engine: Engine,
    jobs: Sequence[Job],
    tasks: Mapping[str, Task],
    folder: Path,
    news: News,
    then: Callable[[Job, RunRecord], Sequence[Job]],
) -> None:
    """Train jobs, and the jobs that follow from their results, until none is left.

    Args:
        engine: Where jobs are trained.
        jobs: The first jobs.
        tasks: Tasks that have been constructed already, with seed 0, by spec.
        folder: The job ``name`` runs in ``runs/name`` of this folder.
        news: Called while jobs run.
        then: Takes each job with its result, and gives the jobs that follow.

    Raises:
        InputError: If a job cannot be run, or its process was lost.
    """
    with engine.open(folder, tasks, news) as running:
        running.submit(jobs)
        for job, run in running.finished():
            running.submit(then(job, run))
            news.finished(job, run)
