"""The arguments of a command: an error in parsing becomes one line in our words.

jsonargparse reports errors as text. All knowledge of that text is here; a text that is not
recognised is passed on as it is, in one line.
"""

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_dumper

from stateline.errors import InputError
from stateline.files import to_yaml
from stateline.plugins import import_code
from stateline.settings import describe

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"')
_VALUE = re.compile(r"(?:Got|Given) value: ?(?P<value>.*)")
_ELSEWHERE = {"min_lr": "final_share"}
"""Options under the names that other programs give them."""

_UNKNOWN_OPTION = re.compile(
    r"(?:unrecognized arguments: --|Option '|Group '(?P<group>[\w.]+)' does not accept option ')"
    r"(?P<name>[\w.]+)"
)
_STRAY_OR_MISSING = re.compile(r"unrecognized arguments: |the following arguments are required: ")

VALUES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none"}
"""Names of types for readers."""

MAX_CHOICES = 78
"""Largest number of characters of an option and its choices on a line of the help."""

set_dumper("yaml", to_yaml)  # jsonargparse reads the text 1e-3 as a number, but does not quote it


class HelpFormatter(DefaultHelpFormatter):
    """Types in words, and no type, default or mark that tells a reader nothing."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an argument; choices that need more than a line are named after what it is."""
        if len(f"{action.option_strings} {action.metavar}") > MAX_CHOICES:
            action.metavar = None
        super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        notes = ["required"] if action.required and action.option_strings else []
        kind = _kind(getattr(action, "_typehint", None))
        if kind and not str(action.metavar).startswith("{"):  # else the choices are shown
            notes.append(kind)
        if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, "", [], {}):
            notes.append(f"default: {_as_typed(action.default)}")
        about = (action.help or "").replace("``", "")  # docstrings mark code so
        return f"{about} ({', '.join(notes)})" if notes else about


def _kind(hint: Any) -> str:
    """A type in words; empty for a text and for what is not one value."""
    parts = map(_without_range, get_args(_without_range(hint)) or (hint,))
    kinds = [part for part in parts if part is not type(None)]
    if get_origin(kinds[0]) is Literal:
        return "one of " + ", ".join(map(str, get_args(kinds[0])))
    return VALUES.get(kinds[0], "") if len(kinds) == 1 and kinds[0] is not str else ""


def _without_range(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _as_typed(default: Any) -> str:
    """A default value as one would give it."""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


class Parser(ArgumentParser):
    """Arguments of one command. An error is an InputError of one line."""

    def __init__(self, **settings: Any) -> None:
        shown = {"print_config": None, "formatter_class": HelpFormatter}
        super().__init__(**{**shown, **settings})

    def argument(self, name: str, about: str, **settings: Any) -> None:
        """Add a positional argument, a text."""
        self.add_argument(name, type=str, help=about, **settings)

    def option(self, name: str, kind: Any, default: Any, about: str, **settings: Any) -> None:
        """Add an option: a list takes several values; ``None`` as the default is also a value.

        A text stays as it is given: with ``str | None``, YAML would read ``null`` and ``#key`` as
        ``None``. A recipe may set an option to ``None`` if that is its default.
        """
        if get_origin(kind) is list:
            (kind,), settings = get_args(kind), {"nargs": "+", **settings}
        elif default is None and kind is not str:
            kind = kind | None
        self.add_argument(f"--{name}", type=kind, default=default, help=about, **settings)

    def switch(self, name: str, about: str) -> None:
        """Add an option without a value."""
        self.add_argument(f"--{name}", action="store_true", help=about)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the settings of a class, without ``--NAME+``; a group's own option in our words."""
        added = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            action.option_strings = [name for name in action.option_strings if name[-1] != "+"]
            if action.metavar == "CONFIG":
                action.help, action.metavar = f"all of {action.dest}.* as YAML, or its file", "YAML"
        return added

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse, and import the code that a recipe names under ``import``."""
        given = super().parse_args(*args, **kwargs)
        for spec in given.pop("import", None) or ():
            import_code(spec)
        return given

    def refuse_others(self, given: Any, kind: str, kinds_of: Mapping[str, Sequence[str]]) -> None:
        """Refuse options that were given and are for other kinds of calls.

        Args:
            given: The parsed arguments.
            kind: The kind of this call.
            kinds_of: For options that not all kinds have, the kinds that have them.
        """
        for name, kinds in kinds_of.items():
            if kind not in kinds and given[name] != self.get_default(name):
                known = ", ".join(kinds)
                raise InputError(f"--{name} is for {known}, not for {kind}: leave it out")

    def shorten_usage(self) -> None:
        """Leave the options out of the usage, which otherwise fills a screen."""
        forms = {"+": "{0} [{0} ...]", "*": "[{0} ...]", "?": "[{0}]"}
        needed = [action for action in self._actions if not action.option_strings]
        words = [forms.get(str(own.nargs), "{0}").format(own.dest) for own in needed]
        self.usage = " ".join(["%(prog)s [options]", *words])

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """Raise InputError with what is wrong."""
        line = " ".join(message.split())
        if _STRAY_OR_MISSING.match(line) and not _UNKNOWN_OPTION.match(line):
            line = f"{line}; {self.prog} --help shows what it takes"
        raise InputError(self._wrong_value(line) or self._unknown_option(line) or line)

    def _wrong_value(self, line: str) -> str:
        """A value of the wrong type in our words; empty if the line reports something else."""
        key, value = _KEY.match(line), _VALUE.search(line)
        if key is None:
            return ""
        name = key["key"]
        if "integer string conversion" in line:
            return f"{name} has too many digits"
        hints = [getattr(a, "_typehint", None) for a in self._actions if a.dest == name]
        if value is None or not hints or hints[0] is None:
            return ""
        return f"{name} must be {describe(hints[0])}, got {value['value']!r}"

    def _unknown_option(self, line: str) -> str:
        """An unknown option with the nearest known one; empty if the line reports otherwise."""
        found = _UNKNOWN_OPTION.match(line)
        if found is None:
            return ""
        name = ".".join(filter(None, [found["group"], found["name"]]))
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        last = name.rpartition(".")[2]
        last = _ELSEWHERE.get(last, last)
        initials = "".join(word[:1] for word in last.split("_"))  # learning_rate: lr
        alike = (last, f"{last}s", initials)
        same = [own for own in known if own.rpartition(".")[2] in alike]
        nearest = same[:1] or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return f"unknown option {name!r}: {hint}{self.prog} --help lists all"


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Show ``--import`` in the help of a command, and allow ``import:`` in its recipe."""
    action = parser.add_argument(
        "--import",
        type=list[str],
        default=[],
        metavar="FILE_OR_MODULE",
        help="import own layers, tasks or backends first; may be given several times",
    )
    action.option_strings = ["--import"]  # without jsonargparse's --import+


def take_imports(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split ``--import X`` and ``--import=X`` from the other arguments.

    Example:
        >>> take_imports(["check", "mine", "--import", "my.py"])
        (['check', 'mine'], ['my.py'])
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--import", action="append", default=[], dest="specs")
    try:
        given, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        given, others = argparse.Namespace(specs=[""]), []
    if "" in given.specs:
        raise InputError("--import needs the path of a .py file or the name of a module")
    return others, given.specs
