"""What a comparison reports while it runs."""

from collections.abc import Sequence
from functools import partial

from stateline.runs.job import Job
from stateline.runs.results import RunRecord, SpeedRecord
from stateline.train.metrics import Metrics


class News:
    """Called by a comparison while it runs; override what is of interest."""

    def planned(self, jobs: int, done: int) -> None:
        """Numbers of jobs: in all, and done before."""

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


_EVENTS = [name for name in vars(News) if not name.startswith("_")]


def together(observers: Sequence[News]) -> News:
    """An observer that passes everything on to several, in this order."""
    news = News()
    for event in _EVENTS:
        setattr(news, event, partial(_tell, observers, event))
    return news


def _tell(observers: Sequence[News], event: str, *what: object) -> None:
    for observer in observers:
        getattr(observer, event)(*what)
