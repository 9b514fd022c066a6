"""Rows of held-out batches, divided among the processes that train a model together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError


@dataclass(frozen=True)
class Division:
    """The processes that score a model together.

    Attributes:
        rank: Number of this process, from 0.
        count: Number of processes.
        share: Returns the values of all processes, by rank.
        sharded: Whether each process holds a part of the model, so that all must make the same
            calls of the model.
    """

    rank: int
    count: int
    share: Callable[[Any], list[Any]]
    sharded: bool


_division: ContextVar[Division | None] = ContextVar("division", default=None)


@contextmanager
def dividing(division: Division) -> Iterator[None]:
    """In the ``with`` block, divide the rows that are scored; all processes get the whole score."""
    token = _division.set(division)
    try:
        yield
    finally:
        _division.reset(token)


def by_rows(compute: Callable[..., Tensor], *inputs: Tensor, may_stop: bool = False) -> Tensor:
    """``compute(*inputs)`` on the CPU; each process computes its own rows.

    Every process makes the same number of calls: a process without rows computes the first row,
    and its result is dropped.

    Args:
        compute: Returns one row for each row of its inputs.
        inputs: Inputs, one for each row.
        may_stop: Whether ``compute`` may raise an InputError before its last call of the model. If
            so, each process of a sharded model computes all rows.

    Raises:
        InputError: If any process raised one.
    """
    division = _division.get()
    if division is None or (may_stop and division.sharded):
        return compute(*inputs).cpu()
    rows = torch.arange(len(inputs[0])).tensor_split(division.count)[division.rank]
    own, problem = torch.empty(0), None
    try:
        own = compute(*(x[rows if len(rows) else [0]] for x in inputs)).cpu()[: len(rows)]
    except InputError as error:
        problem = error
    parts = division.share((own, problem))
    for _, found in parts:
        if found is not None:
            raise found
    return torch.cat([part for part, _ in parts])
