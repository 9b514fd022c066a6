"""Algorithm: run a program and predict what it prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn, TypeVar

import numpy as np
from jaxtyping import Int

from stateline.errors import InputError
from stateline.settings import within
from stateline.tasks.base import IGNORE
from stateline.tasks.synthetic.stream import Episode, StreamTask

LARGEST = 10
"""Largest value; the smallest is 1."""

_OPERATIONS = ("=", "++", "--", "if", "print")
_NAMES = ("x", "y", "z", "p", "r")
_END = "END"

Item = TypeVar("Item")


@dataclass(eq=False, kw_only=True)
class Algorithm(StreamTask):
    """Track the variables of a program, and predict what each ``print`` prints.

    .. code-block:: text

        program   := statement{statements} END
        statement := change | "if" name ("<" | ">") (name | value) ":" change | "print" name ";"
        change    := name "=" value ";" | name "++" ";" | name "--" ";"
        row       := program program ... , cut after length tokens

    Only the ``;`` that ends a ``print`` has a label. The printed value is never part of the input.
    ``=`` sets each variable only once, values stay between 1 and 10, and a program never uses a
    variable before it is set. The two names in a condition differ.

    Statements are drawn by rejection: the operation is drawn uniformly from the five, and if the
    statement cannot be executed, operation and arguments are drawn again. ``=`` takes any variable
    that is not yet set and any value; ``++`` and ``--`` take any variable that is set and stays in
    range. ``if`` compares two variables or a variable and a value, with equal probability, by ``<``
    or ``>``; its change is drawn in the same way, and is executed only if the condition is true.

    The id of a word is its index in :attr:`words`. The values come last; labels are values.

    Args:
        variables: Number of variables, 1 to 5; the paper's are 3 and 5.
        statements: Statements in a program.
        **options: See :class:`~stateline.tasks.StreamTask`; a program is an episode.

    Example:
        >>> task = Algorithm(statements=4)
        >>> words = "x = 7 ; x ++ ; if x < 3 : x -- ; print x ; END".split()
        >>> task.run(words)[-2:]  # at the last ";", at END
        [8, None]

    References:
        Fan et al., "Addressing Some Limitations of Transformers with Feedback Memory", 2020; Ju et
        al., "Staircase Attention for Recurrent Processing of Sequences", 2021; the grammar and the
        probabilities are taken from their released generator, which they call slightly different
        from the one used for their tables.
    """

    title = "Algorithm"
    about = (
        "Shows whether a model can track a few values that every token may change, and recall one. "
        "About one token in 17 is scored. A model that remembers the constants that variables were "
        "set to, but not the later changes, still gets some labels right."
    )

    shortest = 8
    variables: Annotated[int, within(1, len(_NAMES))] = 3
    statements: Annotated[int, within(2)] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names, self.least_row = _NAMES[: self.variables], self.statements
        values = (str(value + 1) for value in range(LARGEST))
        self.words = (*_OPERATIONS, ":", ";", "<", ">", _END, *self.names, *values)
        self._ids = {word: number for number, word in enumerate(self.words)}
        self.vocab_size = len(self.words)

    def episode(self, rng: np.random.Generator) -> Episode:
        """Draw a program."""
        state: dict[str, int] = {}
        words: list[str] = []
        printed: list[int | None] = []
        for _ in range(self.statements):
            statement = self._statement(rng, state)
            words += statement
            printed += _run(statement, state)
        return Episode(self.encode([*words, _END]), self._labels([*printed, None]))

    def encode(self, words: Sequence[str]) -> Int[np.ndarray, " n"]:
        """Ids of words.

        Raises:
            InputError: If a word is unknown.
        """
        if unknown := set(words) - self._ids.keys():
            raise InputError(f"words must be of {' '.join(self.words)}, got {min(unknown)}")
        return np.array([self._ids[word] for word in words])

    def targets(self, words: Sequence[str]) -> Int[np.ndarray, " n"]:
        """Ids of the labels of programs, ``IGNORE`` where there is none."""
        return self._labels(self.run(words))

    def run(self, words: Sequence[str]) -> list[int | None]:
        """The printed value at each word of programs, or None.

        Raises:
            InputError: If the words are not programs, or use a variable that is not set.
        """
        state: dict[str, int] = {}
        return [value for statement in _statements(words) for value in _run(statement, state)]

    def _labels(self, printed: Sequence[int | None]) -> Int[np.ndarray, " n"]:
        first = self._ids["1"]
        return np.array([IGNORE if value is None else first + value - 1 for value in printed])

    def _statement(
        self, rng: np.random.Generator, state: Mapping[str, int], *, nested: bool = False
    ) -> list[str]:
        """Draw a statement that can be executed; a nested one is a change."""
        while True:
            operation = _pick(rng, _OPERATIONS)
            unset = [name for name in self.names if name not in state]
            if operation == "=" and unset:
                return [_pick(rng, unset), "=", _value(rng), ";"]
            if operation == "=" or not state or (nested and operation in ("if", "print")):
                continue
            name = _pick(rng, list(state))
            if operation == "print":
                return ["print", name, ";"]
            if operation == "if" and (condition := _condition(rng, name, state)):
                return [*condition, *self._statement(rng, state, nested=True)]
            limit = {"++": LARGEST, "--": 1}.get(operation)
            if limit and state[name] != limit:
                return [name, operation, ";"]


def _condition(rng: np.random.Generator, name: str, state: Mapping[str, int]) -> list[str]:
    """Draw a condition; nothing if it needs a second variable and there is none."""
    other = _value(rng)
    if rng.random() < 0.5:
        others = [variable for variable in state if variable != name]
        if not others:
            return []
        other = _pick(rng, others)
    return ["if", name, _pick(rng, "<>"), other, ":"]


def _pick(rng: np.random.Generator, items: Sequence[Item]) -> Item:
    return items[int(rng.random() * len(items))]  # several times as fast as rng.choice


def _value(rng: np.random.Generator) -> str:
    return str(1 + int(rng.random() * LARGEST))


def _statements(words: Sequence[str]) -> Iterator[list[str]]:
    """Words up to each ``;`` and each ``END``."""
    statement: list[str] = []
    for word in words:
        statement.append(word)
        if word in (";", _END):
            yield statement
            statement = []
    if statement:
        _refuse(statement)


def _run(statement: list[str], state: dict[str, int]) -> list[int | None]:
    """The printed value at each word of a statement, or None."""
    return [*[None] * (len(statement) - 1), _execute(statement, state)]


def _execute(statement: list[str], state: dict[str, int]) -> int | None:
    """Execute a statement: change the state, or return what it prints."""
    match statement:
        case ["print", name, ";"]:
            return _read(name, state)
        case ["if", name, "<" | ">" as relation, other, ":", *change]:
            left = _read(name, state)
            right = int(other) if other.isdecimal() else _read(other, state)
            holds = left < right if relation == "<" else left > right
            _change(change, state if holds else state.copy())
        case ["END"]:
            state.clear()
        case _:
            _change(statement, state)
    return None


def _change(statement: list[str], state: dict[str, int]) -> None:
    match statement:
        case [name, "=", value, ";"] if name in _NAMES and value.isdecimal():
            state[name] = int(value)
        case [name, "++", ";"]:
            state[name] = _read(name, state) + 1
        case [name, "--", ";"]:
            state[name] = _read(name, state) - 1
        case _:
            _refuse(statement)


def _read(name: str, state: Mapping[str, int]) -> int:
    if name not in state:
        raise InputError(f"a variable must be set before it is used, got {name}: set it first")
    return state[name]


def _refuse(statement: list[str]) -> NoReturn:
    raise InputError(
        "a statement must be such as 'x = 7 ;', 'x ++ ;', 'if x < y : x -- ;', 'print x ;' or "
        f"'END', got {' '.join(statement)!r}"
    )
