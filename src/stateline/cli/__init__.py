"""The command line: ``stateline COMMAND ...``.

``COMMANDS`` is the table of contents. A command is a module with ``add_arguments(parser)``, which
must not import PyTorch, so that ``--help`` answers at once, and ``run(arguments, parser)``.
"""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from stateline.errors import InputError, unknown_name

COMMANDS: Mapping[str, str] = {
    "compare": "train architectures at the same size, score them, time them, write a report",
    "data": "turn text into tokens on disk, to train on",
    "train": "train one architecture on one task",
    "generate": "continue a prompt with a trained model",
    "evaluate": "score a trained model on texts of any length",
    "report": "show the results of several runs side by side, and write their report",
    "info": "parameters, operations and state of an architecture, before it is built",
    "capacity": "bits of a state, what it could copy, how many bits a trained model needs",
    "check": "check the law of sequence layers",
}

_USAGE = "usage: stateline [--help] [--version] COMMAND ..."

_WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>[^"]+)": (?:Does not validate .* Subtypes: |Expected an? )'
    r"(?P<kinds>.*?)(?: Errors: .* Given value:|\. Got value:) (?P<value>.*)"
)

_UNKNOWN_OPTION = re.compile(
    r"(?:unrecognized arguments: --|Option '|Group '(?P<group>[\w.]+)' does not accept option ')"
    r"(?P<name>[\w.]+)"
)


class Parser(ArgumentParser):
    """Arguments of one command; what cannot be parsed is one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # noqa: ARG002
        """Say what is wrong, and leave with exit code 2."""
        line = " ".join(message.split())
        raise InputError(_wrong_value(line) or self._unknown_option(line) or line)

    def _unknown_option(self, line: str) -> str:
        """An option that there is not, with the nearest that there is."""
        found = _UNKNOWN_OPTION.match(line)
        if found is None:
            return ""
        name = ".".join(filter(None, [found["group"], found["name"]]))
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return f"unknown option {name!r}: {hint}{self.prog} --help lists all"


def _wrong_value(line: str) -> str:
    """A value that does not fit its option, in our words; nothing if the parser says else.

    Example:
        >>> _wrong_value('''Parser key "d": Expected a <class 'int'>. Got value: x''')
        "d must be int, got 'x'"
    """
    found = _WRONG_VALUE.fullmatch(line)
    if found is None:
        return ""
    names = re.findall(r"(?:<class '|Literal\[|, )(?:[\w.]+\.)?'?(\w+)", found["kinds"])
    kinds = " or ".join("none" if name == "NoneType" else name for name in names)
    return f"{found['key']} must be {kinds}, got {found['value']!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; by default those of the process.

    Returns:
        The exit code: 0; 1 if a check failed; 2 if the user must change something.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except InputError as error:
        print(f"stateline: error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _wants_memory(error):
            raise
        print(
            "stateline: error: there is not enough memory: lower the width, the length or the "
            "batch size (stateline train --dry-run shows what is needed)",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("\nstateline: interrupted; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 0


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"stateline {version('stateline')}")
        return 0
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command: Any = import_module(f"stateline.cli.{name}")
    parser = Parser(prog=f"stateline {name}", description=command.__doc__, print_config=None)
    command.add_arguments(parser)
    return command.run([_underscored(argument) for argument in arguments[1:]], parser)


def _wants_memory(error: Exception) -> bool:
    """Whether memory ran out, which PyTorch says in words."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text or "t allocate memory" in text


def _underscored(argument: str) -> str:
    """An option with dashes in its name, as ``--save-state``, is the one with underscores."""
    name, equals, value = argument.partition("=")
    name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
    return name + equals + value


def _help() -> str:
    lines = [_USAGE, "", "Sequence models of any mix: compare, train, run.", ""]
    lines += [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "stateline COMMAND --help tells more."])
