"""The base of all records of results."""

from typing import Annotated, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from stateline.errors import InputError

Length = Annotated[int, Meta(ge=1)]
"""A number of tokens, or a length in the task's own unit."""

Bits = Annotated[int, Meta(ge=0)]
"""A number of bits."""

Scores = dict[str, float | None]
"""Scores by metric; ``None`` where training diverged."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the results."""

    def __getitem__(self, name: str) -> NoReturn:
        raise InputError(f"results have attributes, not keys: write .{name} instead of [{name!r}]")


RecordT = TypeVar("RecordT", bound=Record)
