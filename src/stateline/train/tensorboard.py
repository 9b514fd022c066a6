"""Metrics for TensorBoard, where it is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from stateline.train.metrics import Metrics


@contextmanager
def open_board(folder: Path) -> Iterator[Callable[[Metrics], None]]:
    """Give a function that adds a line of metrics to event files in a folder."""
    if find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as board:

        def write(metrics: Metrics) -> None:
            for name, value in asdict(metrics).items():
                if value is not None and name not in ("step", "steps"):
                    board.add_scalar(name, value, metrics.step)

        yield write
