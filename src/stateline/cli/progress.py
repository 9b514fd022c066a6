"""Showing the progress of runs: bars in a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stateline.compare.news import News
from stateline.reports.format import count, words
from stateline.runs.initial import start_in_words
from stateline.runs.job import Job
from stateline.runs.results import RunRecord, SpeedRecord
from stateline.train.metrics import Metrics
from stateline.train.tensorboard import open_board

SECONDS_BETWEEN_LINES = 5.0
"""Shortest time between two lines about one run, where the output is not a terminal."""


def describe(metrics: Metrics, score_name: str) -> str:
    """Metrics as one readable line; the unit of the loss is that of what is trained."""
    score = "" if metrics.metric is None else f"  {score_name} {metrics.metric:.3f}"
    minutes, seconds = divmod(round(metrics.seconds_left), 60)
    speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
    if metrics.utilisation is not None:
        speed += f" ({metrics.utilisation:.0%} of peak)"
    if metrics.memory is not None:
        speed += f"  {metrics.memory / 2**30:.1f} GiB"
    return (
        f"{metrics.step:>5}/{metrics.steps}  loss {metrics.loss:.3f}{score}  {speed}  "
        f"{minutes}:{seconds:02} left"
    )


@contextmanager
def print_metrics(
    job: Job, folder: Path, *, quiet: bool, observers: Sequence[News]
) -> Iterator[Callable[[Metrics], None]]:
    """A function that shows the metrics of a run and, if it is installed, logs to TensorBoard."""
    if quiet:
        yield lambda _: None
        return
    with show_news(Console(markup=False)) as news, open_board(folder) as write:

        def show(metrics: Metrics) -> None:
            for observer in (news, *observers):
                observer.progress(job, metrics)
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


class _Lines(News):
    """Prints a line about each run from time to time."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, dict[Job, float]()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state(self, text: str) -> None:
        self.say(text)

    def planned(self, jobs: int, done: int) -> None:
        self.count, self.done = jobs, done
        self.say(count(jobs, "run") + (f", {done} of them done before" if done else ""))

    def initial(self, job: Job) -> None:
        self.say(f"{job.task} | {job.label}: {start_in_words(job.model, job.init)}")

    def starting(self, workers: int) -> None:
        self.state(f"starting {count(workers, 'worker')}")

    def progress(self, job: Job, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self.last.get(job, float("-inf")) >= SECONDS_BETWEEN_LINES:
            self.last[job] = now
            self.say(f"  {_name(job)}: {describe(metrics, words(job.metric))}")

    def finished(self, job: Job, run: RunRecord) -> None:
        self.done += 1
        self.say(f"{self.done}/{self.count} {_name(job)}: {_outcome(run)}")

    def timing(self, what: str) -> None:
        self.state(f"measuring the speed of {what}")

    def timed(self, speeds: Sequence[SpeedRecord]) -> None:
        if shares := [own.busy for own in speeds if own.disturbed and own.busy is not None]:
            self.say(
                f"other programs used {max(shares):.0%} of the processors while speed was "
                "measured: do not trust the speeds; on an idle machine, remove the folder speed "
                "and repeat the command"
            )


class _Bars(_Lines):
    """One bar for all runs, and one for each active run; lines are printed above the bars."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.console)
        self.bars, self.of_job = progress, dict[Job, TaskID]()
        self.all: TaskID | None = None  # a single run is not planned

    def state(self, text: str) -> None:
        if self.all is not None:
            self.bars.update(self.all, state=text)

    def planned(self, jobs: int, done: int) -> None:
        super().planned(jobs, done)
        self.all = self.bars.add_task("all runs", total=jobs, completed=done, state="")

    def progress(self, job: Job, metrics: Metrics) -> None:
        if job not in self.of_job:
            self.state("")
            self.of_job[job] = self.bars.add_task(_name(job), total=metrics.steps, state="")
        state = describe(metrics, words(job.metric))
        self.bars.update(self.of_job[job], completed=metrics.step, state=state)

    def finished(self, job: Job, run: RunRecord) -> None:
        if bar := self.of_job.pop(job, None):
            self.bars.remove_task(bar)
        super().finished(job, run)
        if self.all is not None:
            self.bars.advance(self.all)


def _name(job: Job) -> str:
    what, own = f" seed {job.training.seed}" if job.training.seed else "", job.training
    if job.trial:
        muon = "" if own.muon_lr is None else f" muon_lr {own.muon_lr:g}"
        what = f" trial lr {own.lr:g}{muon} weight decay {own.weight_decay:g}"
    return f"{job.task} | {job.label}{what}"


def _outcome(run: RunRecord) -> str:
    if not run.by_length:  # a trial
        score = "no score" if run.validation is None else f"{run.validation:.3f} on validation data"
        return f"{score} ({count(run.steps, 'step')}, {run.stopped})"
    length, own = next(iter(run.by_length.items()))
    scores = ", ".join(f"{name} {value:.3f}" for name, value in own.items() if value is not None)
    return f"{scores or 'no score'} at {length} ({count(run.steps, 'step')}, {run.stopped})"
