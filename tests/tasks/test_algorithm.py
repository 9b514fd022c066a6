"""What the algorithm task promises beyond the contract; official samples are a matter of parity."""

import numpy as np
import pytest

from stateline.errors import InputError
from stateline.tasks import IGNORE, Algorithm
from stateline.tasks.base import generator


def words(task: Algorithm, count: int = 20) -> list[str]:
    """Words of some programs, one after the other."""
    rng = generator(0, "test")
    episodes = [task.episode(rng).tokens for _ in range(count)]
    return [task.words[token] for token in np.concatenate(episodes)]


def printed(text: str) -> list[int]:
    return [value for value in Algorithm().run(text.split()) if value is not None]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("x = 7 ; print x ;", [7]),
        ("x = 7 ; x ++ ; x ++ ; x -- ; print x ;", [8]),
        ("x = 1 ; y = 2 ; if x < y : x ++ ; print x ;", [2]),
        ("x = 1 ; y = 2 ; if x > y : x ++ ; print x ;", [1]),
        ("x = 2 ; y = 2 ; if x < y : x ++ ; if x > y : x ++ ; print x ;", [2]),
        ("x = 2 ; if x > 1 : y = 9 ; print y ; print x ;", [9, 2]),
        ("x = 2 ; END x = 3 ; print x ; END", [3]),
    ],
)
def test_a_program_prints(text: str, values: list[int]) -> None:
    assert printed(text) == values


def test_a_label_stands_at_the_end_of_a_print_and_only_there() -> None:
    task = Algorithm()
    run = words(task)
    targets = task.targets(run)
    printing = [run[place - 2] == "print" for place in range(len(run))]
    assert [target != IGNORE for target in targets] == printing


def test_what_a_condition_prevented_is_not_set() -> None:
    with pytest.raises(InputError, match="a variable must be set before it is used, got y"):
        printed("x = 2 ; if x > 2 : y = 9 ; print y ;")


def test_nothing_is_kept_from_one_program_to_the_next() -> None:
    with pytest.raises(InputError, match="must be set before it is used, got x"):
        printed("x = 2 ; END print x ;")


@pytest.mark.parametrize(
    "text",
    [
        "x + 2 ;",
        "x = y ;",
        "q = 2 ;",
        "x = 2 ; if x < 3 : print x ;",
        "x = 2 ; if x < 3 : if x < 4 : x ++ ;",
        "x = 2 ; print x",
        "x = 2 END",
    ],
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a statement must be such as"):
        printed(text)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match=r"words must be of = .* 10, got 11"):
        Algorithm().encode(["x", "=", "11", ";"])


def test_programs_have_so_many_statements() -> None:
    run = words(Algorithm(statements=7), count=3)
    assert run.count(";") == 21
    assert [i for i, word in enumerate(run) if word == "END"][-1] == len(run) - 1


def test_values_stay_in_range() -> None:
    task = Algorithm(variables=5)
    targets = task.targets(words(task, 100))
    asked = targets[targets != IGNORE]
    assert (asked.min(), asked.max()) == (task.vocab_size - 10, task.vocab_size - 1)


def test_a_variable_is_set_once_that_is_known() -> None:
    """Assignments outside conditions, which are always made."""
    run = words(Algorithm(), 1)
    plain = [run[i - 1] for i, word in enumerate(run) if word == "=" and run[i - 2] != ":"]
    assert len(plain) == len(set(plain)) <= 3


@pytest.mark.parametrize(
    "sizes", [{"variables": 0}, {"variables": 6}, {"statements": 1}, {"length": 7}]
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(
        InputError, match=r"to be int (from 1 to 5|of at least [12]), got |at least 8, got "
    ):
        Algorithm(**sizes)  # type: ignore[arg-type]
