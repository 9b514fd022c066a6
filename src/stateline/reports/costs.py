"""What models cost, by length: the fields of the ``speed`` entries, and how they are worded."""

from collections.abc import Callable
from typing import NamedTuple

from stateline.reports.format import short_bytes, short_number
from stateline.reports.records import Record


class Cost(NamedTuple):
    """A field of the ``speed`` entries, a number per length, and how it is worded."""

    field: str
    title: str
    short: str
    unit: str
    length: str
    note: str
    text: Callable[[int | float], str] = short_number
    higher_is_better: bool = False


TRAINING = Cost(
    "train_tokens_per_second",
    title="Training speed",
    short="train tok/s",
    unit="tokens per second",
    length="sequence length (tokens)",
    note="One step is forward, backward and update.",
    higher_is_better=True,
)
DECODING = Cost(
    "decode_tokens_per_second",
    title="Decoding speed",
    short="decode tok/s",
    unit="tokens per second",
    length="tokens already in the state",
    note="One new token at a time, after a context of the given length.",
    higher_is_better=True,
)
STATE = Cost(
    "state_bytes",
    title="State size",
    short="state",
    unit="bytes per sequence",
    length="tokens already in the state",
    note="What one sequence carries along; flat where it does not grow with the context.",
    text=short_bytes,
)
FLOPS = Cost(
    "flops_per_token",
    title="FLOPs per token",
    short="FLOPs",
    unit="FLOPs per token",
    length="sequence length (tokens)",
    note="Counted for one token of a sequence of the given length.",
)


def cost_lengths(results: Record, cost: Cost) -> list[int]:
    """The lengths at which a cost was measured for any model, in order."""
    return sorted({int(length) for entry in results["speed"] for length in entry[cost.field]})
