"""The costs of models by length: state, operations, speeds and memory, and how they are worded."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from stateline.reports.format import short_bytes, short_number
from stateline.runs.results import Results, SpeedRecord


class Measured(NamedTuple):
    """A counted or measured cost: the median, and the quartiles of its rounds."""

    middle: float
    low: float
    high: float


class Cost(NamedTuple):
    """One kind of cost: where it is in the results, and how it is worded.

    Attributes:
        values: The cost of a model by length.
        title: Heading of its chart.
        short: Heading of a column.
        unit: Title of the axis of its chart.
        length: Title of the axis of lengths.
        note: What exactly is counted or measured.
        text: Words for a number.
        higher_is_better: True for speeds.
    """

    values: Callable[[SpeedRecord], Mapping[int, Measured]]
    title: str
    short: str
    unit: str
    length: str
    note: str
    text: Callable[[int | float], str] = short_number
    higher_is_better: bool = False


def _counted(field: str, entry: SpeedRecord) -> dict[int, Measured]:
    return {n: Measured(value, value, value) for n, value in getattr(entry, field).items()}


STATE = Cost(
    partial(_counted, "state_bytes"),
    title="State size",
    short="state",
    unit="bytes per sequence",
    length="tokens already in the state",
    note="Memory that one sequence carries from token to token.",
    text=short_bytes,
)
FLOPS = Cost(
    partial(_counted, "flops_per_token"),
    title="FLOPs per token",
    short="FLOPs",
    unit="FLOPs per token",
    length="sequence length (tokens)",
    note="Forward FLOPs, counted, per token of a sequence of the given length.",
)

_PHASES = {
    "decode": ("Decoding", "One token at a time, after a context of the given length."),
    "prefill": ("Prefill", "Reading a prompt of the given length."),
    "train": ("Training", "An update: forward, backward and optimizer."),
}
_OLDER = {"decode": "decode_tokens_per_second", "train": "train_tokens_per_second"}


def speed(phase: str, batch: int = 1) -> Cost:
    """The speed of a phase (``decode``, ``prefill``, ``train``) with a number of rows at a time."""
    title, note = _PHASES[phase]
    rows = "" if batch == 1 else f", batch {batch}"
    return Cost(
        partial(_speeds, phase, batch),
        title=f"{title} speed{rows}",
        short=f"{phase} tok/s{rows}",
        unit="tokens per second",
        length=_length(phase),
        note=f"{note} {_rows(batch)} Median of the rounds, with a band from quartile to quartile.",
        higher_is_better=True,
    )


def memory(phase: str, batch: int) -> Cost:
    """The peak memory of a phase."""
    title, note = _PHASES[phase]
    return Cost(
        partial(_memory, phase, batch),
        title=f"Peak memory: {title.lower()}, batch {batch}",
        short=f"{phase} memory, batch {batch}",
        unit="bytes beyond model and inputs",
        length=_length(phase),
        note=f"{note} {_rows(batch)}",
        text=short_bytes,
    )


def costs(results: Results) -> Iterator[Cost]:
    """The costs that the results have for at least one model."""
    timed = {(t.phase, t.batch) for entry in results.speed for t in entry.timings}
    older = {(phase, 1) for phase in _OLDER}
    phases = sorted(timed | older, key=lambda at: (list(_PHASES).index(at[0]), at[1]))
    largest = dict(phases)
    found = [STATE, FLOPS, *(speed(*at) for at in phases)]
    found += [memory(phase, largest[phase]) for phase in _PHASES if phase in largest]
    yield from (cost for cost in found if cost_lengths(results, cost))


def cost_lengths(results: Results, cost: Cost) -> list[int]:
    """The lengths at which a cost is known for any model, in order."""
    return sorted({length for entry in results.speed for length in cost.values(entry)})


def common_lengths(results: Results, cost: Cost) -> list[int]:
    """The lengths at which a cost is known for every model that has it; all, if there is none."""
    known = [set(cost.values(entry)) for entry in results.speed if cost.values(entry)]
    return sorted(set.intersection(*known)) if known and set.intersection(*known) else []


def _speeds(phase: str, batch: int, entry: SpeedRecord) -> dict[int, Measured]:
    timed = [t for t in entry.timings if (t.phase, t.batch) == (phase, batch)]
    found = {
        t.length: Measured(t.tokens_per_second, t.low, t.high)
        for t in timed
        if t.tokens_per_second is not None and t.low is not None and t.high is not None
    }
    if entry.timings or batch != 1 or phase not in _OLDER:
        return found
    return _counted(_OLDER[phase], entry)


def _memory(phase: str, batch: int, entry: SpeedRecord) -> dict[int, Measured]:
    timed = [t for t in entry.timings if (t.phase, t.batch) == (phase, batch)]
    peaks = {t.length: t.peak_memory for t in timed if t.peak_memory is not None}
    return {length: Measured(peak, peak, peak) for length, peak in peaks.items()}


def _length(phase: str) -> str:
    return "tokens already in the state" if phase == "decode" else "sequence length (tokens)"


def _rows(batch: int) -> str:
    return "One sequence." if batch == 1 else f"{batch} sequences at a time; tokens of all of them."
