"""Where the jobs of a comparison are trained: what every engine offers."""

from collections.abc import Iterator, Mapping, Sequence
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

        More jobs may be submitted meanwhile, and after the last: a later call yields those.

        Raises:
            InputError: If a job cannot be run, or what runs it was lost.
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
            news: Is called while jobs run.
        """
