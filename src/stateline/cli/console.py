"""The console of the commands: unbuffered, as wide as the terminal or ``COLUMNS`` says."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from signal import SIGINT, SIGTERM, signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120
"""Columns of a table where the output is not a terminal and ``COLUMNS`` is not set."""


def announce(text: str) -> None:
    """Print a line without delay, unless the output is a terminal, which shows progress."""
    if not sys.stdout.isatty():
        print(text, flush=True)


def begin(text: str) -> None:
    """Print a line before PyTorch is loaded, which takes seconds; nothing if it is loaded."""
    if "torch" not in sys.modules:
        print(text, flush=True)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that the run can save and stop; a second SIGINT ends it."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if caught and number == SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal(number, note) for number in (SIGINT, SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal(number, handler)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, output to a closed pipe is dropped instead of raising an error."""
    lasting: Any = _Lasting(sys.stdout)
    with redirect_stdout(lasting):
        yield
        lasting.flush()


def drop_unwritten() -> None:
    """Drop output that cannot be written: Python would try again at its end, and fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _silence(stream)


def _silence(stream: Any) -> None:
    """Send everything that is written to a stream from now on to the null device."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


class _Lasting:
    """A file that is replaced by the null device when its pipe breaks."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with self._silenced():
            self._file.write(text)

    def flush(self) -> None:
        with self._silenced():
            self._file.flush()

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # what is still in the buffer goes to the null device, too
            _silence(self._file)


def wide_console(width: int = WIDTH) -> "Console":
    """A console for tables."""
    from rich.console import Console

    console = Console(markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console


def plain_table(*headings: str, left: int = 0) -> "Table":
    """A table without lines; the first ``left`` columns are left-aligned, others right-aligned."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        if number < left:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right")
    return table
