"""The command that a run records, so that it can be started again."""

import shlex
from collections.abc import Sequence

from stateline.plugins import imported


def command_line(command: str, arguments: Sequence[str]) -> str:
    """A command with its arguments and the code that was imported for it, for a shell.

    Example:
        >>> command_line("compare", ["h3*2", "lstm"])
        "stateline compare 'h3*2' lstm"
    """
    imports = [word for name in imported() for word in ("--import", name)]
    return shlex.join(["stateline", *imports, command, *arguments])
