"""How a run shows that it moves: bars in a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stateline.compare import Job, News, Results
from stateline.train.metrics import Metrics
from stateline.train.tensorboard import open_board

SECONDS_BETWEEN_LINES = 5.0
"""Where there is no terminal, at least so long between two lines about one run."""


def describe(metrics: Metrics) -> str:
    """One line of metrics for people."""
    score = "" if metrics.metric is None else f"  score {metrics.metric:.3f}"
    minutes, seconds = divmod(round(metrics.seconds_left), 60)
    speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
    return (
        f"{metrics.step:>5}/{metrics.steps}  loss {metrics.loss:.3f}{score}  {speed}  "
        f"{minutes}:{seconds:02} left"
    )


@contextmanager
def print_metrics(
    job: Job, folder: Path, *, quiet: bool = False
) -> Iterator[Callable[[Metrics], None]]:
    """Give a function that shows the metrics of one run, also to TensorBoard where it is installed.

    Args:
        job: The run.
        folder: Where TensorBoard's files go.
        quiet: Show nothing.
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
    """Give an observer of a comparison that shows what it is told."""
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
    """One bar for all runs, one for each that is under way."""

    def __init__(self, progress: Progress) -> None:
        self.bars, self.of_job = progress, dict[Job, TaskID]()

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        self.all = self.bars.add_task("all runs", total=len(jobs), completed=done, state="")

    def progress(self, job: Job, metrics: Metrics) -> None:
        if job not in self.of_job:
            self.of_job[job] = self.bars.add_task(_name(job), total=metrics.steps, state="")
        self.bars.update(self.of_job[job], completed=metrics.step, state=describe(metrics))

    def finished(self, job: Job, run: Results) -> None:
        if bar := self.of_job.pop(job, None):
            self.bars.remove_task(bar)
        self.bars.console.print(f"{_name(job)}: {_outcome(run)}", highlight=False, markup=False)
        self.bars.advance(self.all)

    def timing(self, pattern: str) -> None:
        self.bars.update(self.all, state=f"measuring the speed of {pattern}")


class _Lines(News):
    """A line now and then for each run."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, dict[Job, float]()

    def planned(self, jobs: Sequence[Job], done: int) -> None:
        self.count, self.done = len(jobs), done
        self._say(f"{len(jobs)} runs" + (f", {done} of them done before" if done else ""))

    def progress(self, job: Job, metrics: Metrics) -> None:
        now = time.monotonic()
        if now - self.last.get(job, float("-inf")) >= SECONDS_BETWEEN_LINES:
            self.last[job] = now
            self._say(f"  {_name(job)}: {describe(metrics)}")

    def finished(self, job: Job, run: Results) -> None:
        self.done += 1
        self._say(f"{self.done}/{self.count} {_name(job)}: {_outcome(run)}")

    def timing(self, pattern: str) -> None:
        self._say(f"measuring the speed of {pattern}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _name(job: Job) -> str:
    seed = f" seed {job.training.seed}" if job.training.seed else ""
    return f"{job.task} | {job.model.pattern}{seed}"


def _outcome(run: Results) -> str:
    first = next(iter(run["by_length"].items()))
    scores = ", ".join(f"{k} {v:.3f}" for k, v in first[1].items() if v is not None)
    return f"{scores or 'no score'} at {first[0]} ({run['steps']} steps, {run['stopped']})"
