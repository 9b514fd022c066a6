"""What a user can get wrong, in one line each."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was wanted, what came, and the way out. The command line prints it as one
    line and exits with code 2. A traceback is for bugs.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Error for a name that is not in a table, with the nearest known names first.

    Example:
        >>> print(unknown_name("layer", "atention", ["h3", "attention", "s4d"]))
        unknown layer 'atention': did you mean 'attention'? Known: attention, h3, s4d
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return InputError(f"unknown {kind} {name!r}: {hint}Known: {', '.join(names)}")
