"""Messages for users: one line, whatever the user gave."""

from typing import Any

import pytest

from stateline.errors import LONGEST, InputError, unknown_name


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b[31m", "\0", "\u2028", "\udce9"])
def test_line_breaks_and_control_characters_are_shown_escaped(control: str) -> None:
    shown = str(InputError(f"no such file: {control}"))
    assert len(shown.splitlines()) == 1
    assert shown.isprintable()
    assert shown != "no such file: "


def test_letters_of_every_script_stay() -> None:
    assert str(InputError("no such file: né 状態 'a'")) == "no such file: né 状態 'a'"


def test_a_long_value_does_not_flood_the_terminal() -> None:
    shown = str(InputError(f"wanted a number, got {'9' * 10**6}; give a smaller one"))
    assert len(shown) < LONGEST + 10
    assert shown.startswith("wanted a number, got 999")
    assert shown.endswith("999; give a smaller one")


def test_the_nearest_name_is_suggested_for_a_name_of_any_length() -> None:
    assert "did you mean 'lstm'?" in str(unknown_name("layer", "lstn", ["h3", "lstm"]))
    assert "did you mean" not in str(unknown_name("layer", "x" * 10**6, ["h3", "lstm"]))


def test_what_is_no_name_is_unknown_too() -> None:
    given: Any = False  # as a config.json may have it
    assert str(unknown_name("position", given, ["none", "rope"])).startswith(
        "unknown position False: Known"
    )
