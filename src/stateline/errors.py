"""Errors that the user can fix, in one line each."""

import difflib
from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any

LONGEST = 1000
"""Largest number of characters of a message; the middle of a longer one is left out."""


class InputError(ValueError):
    r"""Something the user gave cannot be used.

    The message says what was wanted, what came, and the way out. The command line prints it as one
    line and exits with code 2. A traceback is for bugs.

    Values of the user may hold line breaks or control characters: these are shown escaped, so that
    the message stays one line.

    Example:
        >>> print(InputError("no such file: two\nlines"))
        no such file: two\nlines
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > LONGEST:
            half = LONGEST // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    Example:
        >>> one_line(KeyError("name"))
        "KeyError: 'name'"
    """
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def reason(error: BaseException) -> str:
    """Why something failed, in one line: what the system says, or else the error's text or name.

    Example:
        >>> reason(OSError(28, "No space left on device", "x")), reason(ValueError("no  room."))
        ('No space left on device', 'no room')
    """
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, extensible: bool = False
) -> InputError:
    """Error for a name that is not in a table; it suggests the nearest known name.

    If files of the user can add names (``extensible``), it also says how.

    Example:
        >>> print(unknown_name("layer", "atention", ["h3", "attention", "s4d"]))
        unknown layer 'atention': did you mean 'attention'? Known: attention, h3, s4d
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name)[:LONGEST], names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    own = f"; for a {kind} of your own, import its file (--import FILE)" if extensible else ""
    return InputError(f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}{own}")


def check_choice(kind: str, name: str, choices: Collection[str]) -> None:
    """Refuse a name that is not among the choices.

    Raises:
        InputError: If it is not; see :func:`unknown_name`.
    """
    if name not in choices:
        raise unknown_name(kind, name, choices)


def needed(package: str, user: str, extra: str) -> Any:
    """Import a package that not every installation has.

    Args:
        package: Its name.
        user: What needs it, for the message.
        extra: Name of the extra with which it is installed.

    Raises:
        InputError: If it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise InputError(
            f"{user} needs the package {package}: pip install 'stateline[{extra}]'"
        ) from error
