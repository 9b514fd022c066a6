"""What a comparison reports while it runs."""

from collections.abc import Sequence

from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.train.metrics import Metrics


class News:
    """Called by a comparison while it runs; override what is of interest."""

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        """All jobs are known, and so many of them were done before."""

    def starting(self, workers: int) -> None:
        """Worker processes are being started, which takes some seconds."""

    def progress(self, job: Job, metrics: Metrics) -> None:
        """A job has trained further."""

    def finished(self, job: Job, run: RunRecord) -> None:
        """A job is done."""

    def timing(self, model: str) -> None:
        """The speed of a model is being measured."""
