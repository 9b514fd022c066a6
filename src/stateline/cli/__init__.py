"""The command line: ``stateline COMMAND ...``.

``COMMANDS`` lists the commands. A command is a module with ``add_arguments(parser)`` and
``run(arguments, parser)``. Neither the module nor ``add_arguments`` may import PyTorch, so that
``--help`` answers at once.
"""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, TextIO

from stateline.allocator import keep_freed_memory
from stateline.cli.console import drop_unwritten, lasting_output
from stateline.cli.parser import Parser, add_import_option, take_imports
from stateline.errors import InputError, check_choice
from stateline.plugins import import_code
from stateline.workers import wait_passively

COMMANDS: Mapping[str, str] = {
    "compare": "train architectures of one size, score and time them, write a report",
    "reproduce": "run a table or figure of a paper with its seeds, and write it",
    "data": "turn text into a corpus of tokens on disk",
    "train": "train one architecture on one task",
    "distill": "turn a trained transformer into a hybrid that learns from it",
    "generate": "continue a prompt with a trained model",
    "serve": "serve a trained model over HTTP, with states that are kept",
    "evaluate": "score a trained model on texts of any length, or on evaluation tasks",
    "probe": "measure what models retrieve from their context, by its length",
    "report": "show the results of several runs side by side and write a report",
    "info": "parameters, operations and state size of an architecture",
    "convert": "read a published model, write it in our format or the official one",
    "export": "write a trained model as a folder of Hugging Face transformers",
    "capacity": "size of a state in bits, and how many of them a trained model needs",
    "check": "check that a layer computes the same in every mode",
    "bench": "measure speed and memory of ops, layers, training and decoding",
}

WORK_IS_OUTPUT = ("generate",)
"""Commands that end when their output pipe is closed; others finish their work without output."""

_USAGE = """usage: stateline [--import FILE_OR_MODULE] COMMAND ...
       stateline --help | --version | --completion"""


class _Log(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, so that a line does not break a progress display."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        self.setStream(sys.stderr)
        super().emit(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; by default the arguments of the process.

    Returns:
        The exit code: 0; 1 if a check failed; 2 if the user must change something; 130 or 143
        after an interrupt or a TERM signal.
    """
    if argv is None:  # the process is ours
        signal.signal(signal.SIGTERM, _terminate)
        wait_passively()
        if not os.environ.get("COLUMNS", "").strip("0"):  # as in shutil, 0 counts as unset
            os.environ.pop("COLUMNS", None)
        _open_streams()
        for stream in (sys.stdout, sys.stderr):  # an encoding without some character is no error
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        logging.basicConfig(format="stateline: %(message)s", handlers=[_Log()])
        logging.getLogger("stateline").setLevel(logging.INFO)
        keep_freed_memory()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a failure is still reported in one line
        return code
    except KeyboardInterrupt as error:
        print("\nstateline: interrupted; finished work is kept", file=sys.stderr)
        return 128 + (error.args or (signal.SIGINT,))[0]
    except BrokenPipeError:  # the reader of the output has ended
        return 0
    except Exception as error:
        message = _message(error)
        if not message:
            raise
        print(f"stateline: error: {InputError(message)}", file=sys.stderr)  # one line
        return 2
    finally:
        if argv is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to clean up
            drop_unwritten()


def _terminate(number: int, _: object) -> None:
    """End as an interrupt does, so that workers are stopped and nothing half-written is left."""
    raise KeyboardInterrupt(number)


def _open_streams() -> None:
    """Open the null device in place of a standard stream that is closed, as by ``>&-``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def _dispatch(arguments: list[str]) -> int:
    arguments, specs = take_imports(arguments)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"stateline {version('stateline')}")
        return 0
    if name == "--completion":
        from stateline.cli.completion import completion

        print(completion(COMMANDS, lambda name: _command(name)[1]), end="")
        return 0
    check_choice("command", name, COMMANDS)
    for spec in specs:
        import_code(spec)
    command, parser = _command(name)
    given = [_underscored(argument) for argument in arguments[1:]]
    with nullcontext() if name in WORK_IS_OUTPUT else lasting_output():
        return command.run(given, parser)


def _command(name: str) -> tuple[Any, Parser]:
    """The module of a command, and the parser of its arguments."""
    command: Any = import_module(f"stateline.cli.{name}")
    parser = Parser(prog=f"stateline {name}", description=command.__doc__)
    add_import_option(parser)
    command.add_arguments(parser)
    parser.shorten_usage()
    return command, parser


def _message(error: Exception) -> str:
    """Advice about an error; empty for a bug, which shows its traceback."""
    text = str(error)
    if isinstance(error, InputError):
        return text
    if isinstance(error, MemoryError) or "out of memory" in text or "t allocate memory" in text:
        return (
            "there is not enough memory: lower the width, the length or the batch size "
            "(stateline train --dry-run shows what is needed)"
        )
    if "No working C++ compiler" in text:
        return "torch.compile found no C++ compiler: install one, or leave out --train.compile"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    if isinstance(error, RecursionError):
        return "something given is nested too deep: use fewer levels"
    if isinstance(error, OverflowError):
        return f"a number is too large: {text}"
    if isinstance(error, UnicodeError):
        return f"some text cannot be encoded or decoded: {text}"
    if isinstance(error, ValueError) and "null" in text:
        return "a path must not contain a NUL character"
    if isinstance(error, ValueError) and "integer string conversion" in text:
        return "a number has too many digits"
    return ""


def _underscored(argument: str) -> str:
    """The option with underscores in its name: ``--save_state`` for ``--save-state``."""
    name = r"(?<=^--)[\w.-]+(?==|\Z)"  # a value, such as "-- a-b", has other characters
    return re.sub(name, lambda found: found[0].replace("-", "_"), argument, flags=re.ASCII)


def _help() -> str:
    lines = [_USAGE, "", "Compare, train and run sequence models of mixed layers.", ""]
    lines += [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    lines += ["", 'Tab completion: eval "$(stateline --completion)"']
    return "\n".join([*lines, "", "stateline COMMAND --help shows the options."])
