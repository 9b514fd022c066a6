"""The costs of models by length, and how they are worded."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stateline.reports.format import short_bytes, short_number
from stateline.runs.results import Results, SpeedRecord


class Cost(NamedTuple):
    """One kind of cost: where it is in the results, and how it is worded."""

    values: Callable[[SpeedRecord], Mapping[int, int | float]]
    title: str
    short: str
    unit: str
    length: str
    note: str
    text: Callable[[int | float], str] = short_number
    higher_is_better: bool = False


TRAINING = Cost(
    lambda entry: entry.train_tokens_per_second,
    title="Training speed",
    short="train tok/s",
    unit="tokens per second",
    length="sequence length (tokens)",
    note="A training step is forward, backward and update.",
    higher_is_better=True,
)
DECODING = Cost(
    lambda entry: entry.decode_tokens_per_second,
    title="Decoding speed",
    short="decode tok/s",
    unit="tokens per second",
    length="tokens already in the state",
    note="One sequence, one token at a time, after a context of the given length.",
    higher_is_better=True,
)
STATE = Cost(
    lambda entry: entry.state_bytes,
    title="State size",
    short="state",
    unit="bytes per sequence",
    length="tokens already in the state",
    note="Memory that one sequence carries from token to token.",
    text=short_bytes,
)
FLOPS = Cost(
    lambda entry: entry.flops_per_token,
    title="FLOPs per token",
    short="FLOPs",
    unit="FLOPs per token",
    length="sequence length (tokens)",
    note="Forward FLOPs, counted, per token of a sequence of the given length.",
)


def cost_lengths(results: Results, cost: Cost) -> list[int]:
    """The lengths at which a cost was measured for any model, in order."""
    return sorted({length for entry in results.speed for length in cost.values(entry)})
