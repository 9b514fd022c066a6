"""The format of ``heads.json``."""

import math
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from stateline.errors import InputError
from stateline.files import regular_file
from stateline.runs.record import Record
from stateline.runs.results import from_json
from stateline.train.environment import environment

FILE = "heads.json"

Unit = Literal["heads", "layers", "windows"]


class Loss(Record, frozen=True, kw_only=True):
    """What is lost without a head, or without a layer: means over the examples.

    Attributes:
        layer: Number of the layer, counted over mixers from 0.
        head: Number of the head in it; -1 for the whole layer.
        window: How many positions the head still sees.
        match: Fall of the share of exact answers.
        match_error: Its standard error, over pairs of an example with and without the head.
        nats: Rise of the negative log-likelihood of an answer.
        nats_error: Its standard error.
    """

    layer: int
    head: int
    match: float
    match_error: float
    nats: float
    nats_error: float
    window: int = 0


class Need(NamedTuple):
    """How many tokens a head needs to see.

    Attributes:
        window: The smallest window from which on an answer loses no more than its standard error;
            ``None`` if it loses more in each.
        losses: What is lost in each window, the smallest first.
    """

    window: int | None
    losses: list[Loss]


class Ablation(Record, frozen=True, kw_only=True):
    """A model, without each of its heads.

    Attributes:
        model: Name of the model.
        task: Name of the probe, or the task.
        length: Length, in the unit of the task.
        unit: What is silenced at a time; ``windows``: heads that see few positions.
        key: Hash of all that the scores depend on.
        examples: Number of examples.
        match: Share of exact answers of the whole model.
        nats: Its negative log-likelihood of an answer.
        layers: Number of layers in all.
        losses: What was measured so far, layer by layer.
        seconds: Time spent.
    """

    model: str
    task: str
    length: int
    unit: Unit
    key: str
    examples: int
    match: float
    nats: float
    layers: int
    losses: list[Loss]
    seconds: float

    @property
    def done(self) -> int:
        """Number of layers that were measured."""
        return len({loss.layer for loss in self.losses})

    def ranking(self) -> list[Loss]:
        """The heads, the one that the answers need most first."""
        return sorted(self.losses, key=lambda loss: (-loss.nats, loss.layer, loss.head))

    def needs(self) -> list[Need]:
        """What each head needs to see, those that need most first."""
        heads = dict[tuple[int, int], list[Loss]]()
        for loss in sorted(self.losses, key=lambda loss: loss.window):
            heads.setdefault((loss.layer, loss.head), []).append(loss)
        found = list[Need]()
        for losses in heads.values():
            enough = takewhile(lambda loss: loss.nats <= loss.nats_error, reversed(losses))
            found.append(Need(min((loss.window for loss in enough), default=None), losses))
        return sorted(found, key=lambda need: (-(need.window or math.inf), -need.losses[0].nats))


class Ablations(Record, frozen=True, kw_only=True):
    """The content of ``heads.json``."""

    format: Literal["stateline-heads-1"] = "stateline-heads-1"
    command: str
    created: str
    environment: dict[str, str | int]
    found: list[Ablation]


def read_heads(folder: Path) -> Ablations:
    """Read ``heads.json``.

    Raises:
        InputError: If it is missing or damaged.
    """
    path = regular_file(folder / FILE, "results of heads")
    try:
        return from_json(path.read_bytes(), Ablations)
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}; restore it, or remove it to begin anew"
        ) from error


def no_ablations(command: str) -> Ablations:
    """Results before the first measurement."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Ablations(command=command, created=created, environment={**environment()}, found=[])
