"""The console of the commands: unbuffered, as wide as the reader says."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Columns of a table where the output is no terminal and ``COLUMNS`` is not set."""


def announce(text: str) -> None:
    """Say at once what begins, where the output is not a terminal and nothing moves for long."""
    if not sys.stdout.isatty():
        print(text, flush=True)


def wide_console() -> "Console":
    """A console for tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console
