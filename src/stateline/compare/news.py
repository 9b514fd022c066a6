"""What a comparison reports while it runs."""

import time
from collections.abc import Sequence

from stateline.runs.job import Job
from stateline.runs.results import RunRecord, SpeedRecord
from stateline.train.metrics import Metrics


class News:
    """Called by a comparison while it runs; override what is of interest."""

    def planned(self, jobs: int, done: int) -> None:
        """Numbers of jobs: in all, and done before."""

    def initial(self, job: Job) -> None:
        """A model starts from the weights in a folder; told once, with one of its jobs."""

    def starting(self, workers: int) -> None:
        """Worker processes are being started, which takes some seconds."""

    def progress(self, job: Job, metrics: Metrics) -> None:
        """A job has trained further."""

    def finished(self, job: Job, run: RunRecord) -> None:
        """A job is done."""

    def timing(self, what: str) -> None:
        """Speed is being measured: number of models, phase, and size."""

    def timed(self, speeds: Sequence[SpeedRecord]) -> None:
        """The speed of all models has been measured."""


class TimeIsOver(Exception):
    """The minutes of a comparison are over; its runs can be continued."""


class Deadline(News):
    """Stops a comparison when its time is over: raises :class:`TimeIsOver` at the next news."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def _check(self) -> None:
        if time.monotonic() > self.end:
            raise TimeIsOver

    def progress(self, job: Job, metrics: Metrics) -> None:  # noqa: ARG002
        """A job has trained further."""
        self._check()

    def finished(self, job: Job, run: RunRecord) -> None:  # noqa: ARG002
        """A job is done."""
        self._check()


def together(observers: Sequence[News]) -> News:
    """An observer that passes everything on to several, in this order."""
    return _Together(observers)


class _Together(News):
    def __init__(self, observers: Sequence[News]) -> None:
        self.observers = observers

    def planned(self, jobs: int, done: int) -> None:
        for observer in self.observers:
            observer.planned(jobs, done)

    def initial(self, job: Job) -> None:
        for observer in self.observers:
            observer.initial(job)

    def starting(self, workers: int) -> None:
        for observer in self.observers:
            observer.starting(workers)

    def progress(self, job: Job, metrics: Metrics) -> None:
        for observer in self.observers:
            observer.progress(job, metrics)

    def finished(self, job: Job, run: RunRecord) -> None:
        for observer in self.observers:
            observer.finished(job, run)

    def timing(self, what: str) -> None:
        for observer in self.observers:
            observer.timing(what)

    def timed(self, speeds: Sequence[SpeedRecord]) -> None:
        for observer in self.observers:
            observer.timed(speeds)
