"""Metrics for TensorBoard, if it is installed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from stateline.train.folder import found
from stateline.train.metrics import Metrics


@contextmanager
def open_board(folder: Path) -> Iterator[Callable[[Metrics], None]]:
    """Give a function that adds metrics to event files in a run's folder.

    A continued run removes the events after its newest checkpoint.
    """
    if find_spec("tensorboard") is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    goes_on = [int(path.name.removeprefix("step-")) + 1 for path in found(folder)]
    with ExitStack() as opened:

        @cache
        def board() -> SummaryWriter:  # made with the first line: a run that fails leaves no file
            writer = SummaryWriter(str(folder), purge_step=max(goes_on, default=None))
            return opened.enter_context(writer)

        def write(metrics: Metrics) -> None:
            for name, value in asdict(metrics).items():
                if value is not None and name not in ("step", "steps"):
                    board().add_scalar(name, value, metrics.step)

        yield write
