"""What a comparison reports while it runs."""

from collections.abc import Sequence

from stateline.runs.job import Job
from stateline.runs.results import RunRecord, SpeedRecord
from stateline.train.metrics import Metrics


class News:
    """Called by a comparison while it runs; override what is of interest."""

    def planned(self, jobs: int, done: int) -> None:
        """There will be so many jobs, and so many of them were done before."""

    def starting(self, workers: int) -> None:
        """Worker processes are being started, which takes some seconds."""

    def progress(self, job: Job, metrics: Metrics) -> None:
        """A job has trained further."""

    def finished(self, job: Job, run: RunRecord) -> None:
        """A job is done."""

    def timing(self, what: str) -> None:
        """Speed is being measured: of so many models, in which phase, at which size."""

    def timed(self, speeds: Sequence[SpeedRecord]) -> None:
        """The speed of all models has been measured."""
