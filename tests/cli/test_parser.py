"""Errors of parsing and of the system become one line in our words."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from stateline import InputError, cli
from stateline.cli import Parser, main
from stateline.cli.parser import take_imports


def make() -> Parser:
    parser = Parser(prog="stateline try")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--share", type=float | None, default=None)
    parser.add_argument("--kind", type=Literal["a", "b"] | None, default=None)
    parser.add_argument("--names", type=list[str], default=[])
    parser.add_argument("--train.steps", type=int, default=1)
    parser.add_argument("--train.lr", type=float, default=1.0)
    return parser


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "x"], "count must be int, got 'x'"),
        (["--count", "two\nlines"], "count must be int, got 'two lines'"),
        (["--count", "9" * 5000], "count has too many digits"),
        (["--share", "inf"], "share must be a finite number or none, got 'inf'"),
        (["--kind", "c"], "kind must be one of a, b or none, got 'c'"),
        (["--train.steps", "1.5"], "train.steps must be int, got '1.5'"),
        (["--cuont", "1"], "unknown option 'cuont': did you mean 'count'? stateline try --help"),
        (["--train.stpes", "1"], "unknown option 'train.stpes': did you mean 'train.steps'?"),
        (
            ["--train.learning_rate", "1"],
            "unknown option 'train.learning_rate': did you mean 'train.lr'",
        ),
        (["--lr", "1"], "unknown option 'lr': did you mean 'train.lr'?"),
        (["extra"], "unrecognized arguments: extra; stateline try --help shows what it takes"),
    ],
)
def test_what_cannot_be_parsed_is_one_line_in_our_words(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        make().parse_args(arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_message_in_other_words_is_passed_on_in_one_line() -> None:
    with pytest.raises(InputError, match=r"^something new happened$"):
        make().error("something\n  new   happened")


@pytest.mark.parametrize(
    "text", ["#secret", "null", "~", "", " ", "1e5", "true", "007", "a: b", "a #b", "[1]", "'q'"]
)
def test_a_text_stays_as_it_is_given(text: str) -> None:
    parser = Parser(prog="stateline try")
    parser.option("key", str, None, "a text or none")
    parser.option("out", str, "runs", "a text")
    parser.option("names", list[str], None, "texts")
    given = parser.parse_args([f"--key={text}", f"--out={text}", "--names", text, text])
    assert (given.key, given.out, given.names) == (text, text, [text, text])


def test_null_in_a_file_is_none(tmp_path: Path) -> None:
    parser = Parser(prog="stateline try", default_config_files=[str(tmp_path / "recipe.yaml")])
    parser.option("key", str, "default", "a text or none")
    parser.option("init", str, None, "a text or none")
    (tmp_path / "recipe.yaml").write_text("init: null\nkey: 'null'\n")
    assert parser.parse_args([]).init is None
    assert parser.parse_args([]).key == "null"
    assert parser.parse_args(["--init", "null"]).init == "null"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ([], [])),
        (["--import", "a.py", "check", "--import=b"], (["check"], ["a.py", "b"])),
        (["check", "--important"], (["check", "--important"], [])),
    ],
)
def test_imports_are_split_from_the_other_arguments(
    arguments: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert take_imports(arguments) == expected


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--save-state", "--save_state"),
        ("--model.d-model=a-b=c-d", "--model.d_model=a-b=c-d"),
        ("-- a-b-c d", "-- a-b-c d"),
        ("--a-b c-d=e-f", "--a-b c-d=e-f"),
        ("--a-b\n", "--a-b\n"),
        ("--", "--"),
        ("-a-b", "-a-b"),
        ("a--b-c", "a--b-c"),
    ],
)
def test_names_of_options_alone_may_have_hyphens(argument: str, expected: str) -> None:
    assert cli._underscored(argument) == expected


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def fail(_: list[str]) -> int:
        raise error

    return fail


def too_many_digits() -> ValueError:
    with pytest.raises(ValueError, match="integer string") as caught:
        int("9" * 5000)
    return caught.value


def null_byte() -> ValueError:
    with pytest.raises(ValueError, match="null") as caught:
        os.stat("a\0b")
    return caught.value


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "x"), "Permission denied: x"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "File name too long: x"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "x"), "Too many levels of "),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No such file", "two\nlines"), r"two\nlines"),
        (RecursionError("deep"), "nested too deep"),
        (OverflowError("int too large to convert to float"), "a number is too large: int too"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), "cannot be encoded"),
        (too_many_digits(), "a number has too many digits"),
        (null_byte(), "must not contain a NUL character"),
        (InputError("a\x1b[31mb"), r"a\x1b[31mb"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), "leave out --train"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough"),
    ],
)
def test_an_error_of_the_system_is_one_line(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_dispatch", raising(error))
    assert main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stateline: error: ")
    assert message in line


@pytest.mark.parametrize("error", [TypeError("bug"), ValueError("bug"), RuntimeError("bug")])
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_dispatch", raising(error))
    with pytest.raises(type(error), match="bug"):
        main([])
