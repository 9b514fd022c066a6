"""Metrics for TensorBoard, where it is installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from stateline.train.checkpoint import found
from stateline.train.metrics import Metrics


@contextmanager
def open_board(folder: Path) -> Iterator[Callable[[Metrics], None]]:
    """Give a function that adds a line of metrics to event files in a run's folder.

    A run that goes on takes back what it told of steps after its newest checkpoint.
    """
    if find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    goes_on = [int(path.name.removeprefix("step-")) + 1 for path in found(folder)]
    with ExitStack() as opened:

        @cache
        def board() -> SummaryWriter:  # with the first line: a run that cannot begin leaves no file
            writer = SummaryWriter(str(folder), purge_step=max(goes_on, default=None))
            return opened.enter_context(writer)

        def write(metrics: Metrics) -> None:
            for name, value in asdict(metrics).items():
                if value is not None and name not in ("step", "steps"):
                    board().add_scalar(name, value, metrics.step)

        yield write
