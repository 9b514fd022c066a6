"""Showing the progress of runs: bars in a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stateline.compare.news import News
from stateline.models.pattern import parse_pattern
from stateline.reports.format import words
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.tasks import TASKS
from stateline.train.metrics import Metrics
from stateline.train.tensorboard import open_board

SECONDS_BETWEEN_LINES = 5.0
"""Shortest time between two lines about one run, where the output is not a terminal."""


def describe(metrics: Metrics, score_name: str) -> str:
    """Metrics as one readable line; the loss is in nats per target."""
    score = "" if metrics.metric is None else f"  {score_name} {metrics.metric:.3f}"
    minutes, seconds = divmod(round(metrics.seconds_left), 60)
    speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
    if metrics.utilisation is not None:
        speed += f" ({metrics.utilisation:.0%} of peak)"
    if metrics.memory is not None:
        speed += f"  {metrics.memory / 2**30:.1f} GiB"
    return (
        f"{metrics.step:>5}/{metrics.steps}  loss {metrics.loss:.3f} nats{score}  {speed}  "
        f"{minutes}:{seconds:02} left"
    )


@contextmanager
def print_metrics(
    job: Job, folder: Path, *, quiet: bool = False
) -> Iterator[Callable[[Metrics], None]]:
    """A function that shows the metrics of one run, and logs them to TensorBoard if installed.

    Args:
        job: The run.
        folder: Folder for TensorBoard's files.
        quiet: Show and log nothing.
    """
    if quiet:
        yield lambda _: None
        return
    with show_news(Console()) as news, open_board(folder) as write:

        def show(metrics: Metrics) -> None:
            news.progress(job, metrics)
            write(metrics)

        yield show


@contextmanager
def show_news(console: Console) -> Iterator[News]:
    """An observer that shows the progress of a comparison."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)


class _Bars(News):
    """One bar for all runs, and one for each that is under way."""

    def __init__(self, progress: Progress) -> None:
        self.bars, self.of_job = progress, dict[Job, TaskID]()

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        self.all = self.bars.add_task("all runs", total=len(jobs), completed=done, state="")

    def starting(self, workers: int) -> None:
        self.bars.update(self.all, state=_starting(workers))

    def progress(self, job: Job, metrics: Metrics) -> None:
        if job not in self.of_job:
            self.bars.update(self.all, state="")
            self.of_job[job] = self.bars.add_task(_name(job), total=metrics.steps, state="")
        self.bars.update(
            self.of_job[job], completed=metrics.step, state=describe(metrics, _score_name(job))
        )

    def finished(self, job: Job, run: RunRecord) -> None:
        if bar := self.of_job.pop(job, None):
            self.bars.remove_task(bar)
        self.bars.console.print(f"{_name(job)}: {_outcome(run)}", highlight=False, markup=False)
        self.bars.advance(self.all)

    def timing(self, model: str) -> None:
        self.bars.update(self.all, state=f"measuring the speed of {model}")


class _Lines(News):
    """A line about each run from time to time."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, dict[Job, float]()

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        self.count, self.done = len(jobs), done
        self._say(f"{len(jobs)} runs" + (f", {done} of them done before" if done else ""))

    def starting(self, workers: int) -> None:
        self._say(_starting(workers))

    def progress(self, job: Job, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self.last.get(job, float("-inf")) >= SECONDS_BETWEEN_LINES:
            self.last[job] = now
            self._say(f"  {_name(job)}: {describe(metrics, _score_name(job))}")

    def finished(self, job: Job, run: RunRecord) -> None:
        self.done += 1
        self._say(f"{self.done}/{self.count} {_name(job)}: {_outcome(run)}")

    def timing(self, model: str) -> None:
        self._say(f"measuring the speed of {model}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _starting(workers: int) -> str:
    return f"starting {workers} worker{'s' if workers > 1 else ''}"


def _name(job: Job) -> str:
    seed = f" seed {job.training.seed}" if job.training.seed else ""
    return f"{job.task} | {job.label}{seed}"


def _score_name(job: Job) -> str:
    """The metric of a job's task in words: ``"bits per byte"``."""
    return words(TASKS[parse_pattern(job.task)[0].name].metric)


def _outcome(run: RunRecord) -> str:
    length, own = next(iter(run.by_length.items()))
    scores = ", ".join(f"{name} {value:.3f}" for name, value in own.items() if value is not None)
    return f"{scores or 'no score'} at {length} ({run.steps} steps, {run.stopped})"
