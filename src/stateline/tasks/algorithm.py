"""Algorithm: run a program in the head, and say what it prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import numpy as np
from jaxtyping import Int

from stateline.errors import InputError
from stateline.tasks.base import IGNORE
from stateline.tasks.stream import Episode, StreamTask

LARGEST = 10
"""Values are from 1 to this."""

_OPERATIONS = ("=", "++", "--", "if", "print")
_NAMES = ("x", "y", "z", "p", "r")
_END = "END"

Item = TypeVar("Item")


class Algorithm(StreamTask):
    """Follow the variables of a program, and tell what each ``print`` prints.

    .. code-block:: text

        program   := statement{statements} END
        statement := change | "if" name ("<" | ">") (name | value) ":" change | "print" name ";"
        change    := name "=" value ";" | name "++" ";" | name "--" ";"
        row       := program program ... , cut after length tokens

    The label stands at the ``;`` of a ``print``; nothing else is scored, and what is printed is
    never part of the input. Variables are set once, values stay from 1 to 10, and a program never
    uses a variable that is not set. In a condition the two names differ.

    A statement is drawn uniformly from the five operations, and drawn again, the operation too, if
    it cannot be: ``=`` takes any variable not yet set and any value, ``++`` and ``--`` any variable
    that is set and can still grow or shrink, ``if`` with equal chance two names or a name and a
    value, ``<`` or ``>``, and a change drawn in the same way, which may be one that is not made.

    Words have the ids of :attr:`words`, the values last: they are what labels are made of.

    Args:
        seed: Fixes every batch.
        variables: Number of variables, 1 to 5; the paper's are 3 and 5.
        statements: Statements in a program.
        length: Tokens in a training row.
        batch_size: Rows in a training batch.
        reset: With carried state, begin each program from an empty state at the start of a segment.

    Raises:
        InputError: If a size is out of range.

    Example:
        >>> task = Algorithm(statements=4)
        >>> words = "x = 7 ; x ++ ; if x < 3 : x -- ; print x ; END".split()
        >>> task.run(words)[-2:]  # at the last ";", at END
        [8, None]

    References:
        Fan et al., "Addressing Some Limitations of Transformers with Feedback Memory", 2020; Ju et
        al., "Staircase Attention for Recurrent Processing of Sequences", 2021; the grammar and the
        chances are those of their released generator, which they call slightly different from the
        one behind their tables.
    """

    title = "Algorithm"
    about = (
        "Tells whether a model can keep a few values that every token may change and look one up. "
        "About one token in 17 is scored. A model that knows the constants a variable was set to, "
        "but not what became of them, still gets some right."
    )

    def __init__(
        self,
        seed: int = 0,
        *,
        variables: int = 3,
        statements: int = 100,
        length: int = 128,
        batch_size: int = 32,
        reset: bool = False,
    ) -> None:
        if not 1 <= variables <= len(_NAMES) or statements < 2 or length < 8 or batch_size < 1:
            raise InputError(
                f"variables must be from 1 to {len(_NAMES)}, statements at least 2, length at "
                f"least 8 and batch_size at least 1, got variables={variables}, "
                f"statements={statements}, length={length} and batch_size={batch_size}"
            )
        self.seed, self.batch_size, self.reset = seed, batch_size, reset
        self.names, self.statements = _NAMES[:variables], statements
        values = (str(value + 1) for value in range(LARGEST))
        self.words = (*_OPERATIONS, ":", ";", "<", ">", _END, *self.names, *values)
        self._ids = {word: number for number, word in enumerate(self.words)}
        self.vocab_size = len(self.words)
        self.train_length = length
        self.eval_lengths = (length, 2 * length, 4 * length)

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
        """What is printed at each word of programs.

        Raises:
            InputError: If the words are no programs, or use a variable that is not set.
        """
        state: dict[str, int] = {}
        return [value for statement in _statements(words) for value in _run(statement, state)]

    def _labels(self, printed: Sequence[int | None]) -> Int[np.ndarray, " n"]:
        first = self._ids["1"]
        return np.array([IGNORE if value is None else first + value - 1 for value in printed])

    def _statement(
        self, rng: np.random.Generator, state: Mapping[str, int], *, nested: bool = False
    ) -> list[str]:
        """Draw one that can be executed; a nested one as a change."""
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
    """Draw what stands before a change; nothing if a second name is wanted and there is none."""
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
    """What is printed at each word of a statement."""
    return [*[None] * (len(statement) - 1), _execute(statement, state)]


def _execute(statement: list[str], state: dict[str, int]) -> int | None:
    """Change the state as a statement says, or give what it prints."""
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
