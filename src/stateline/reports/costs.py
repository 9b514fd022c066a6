"""The costs of models by length: state, operations, speeds and memory, and how they are worded."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from stateline.reports.format import short_bytes, short_number
from stateline.runs.results import Results, SpeedRecord, TimingRecord


class Interval(NamedTuple):
    """A counted or measured cost: the median, and the ends of its spread."""

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
        notes: The exact definition of the cost, in sentences.
        text: Words for a number.
        higher_is_better: True for speeds.
    """

    values: Callable[[SpeedRecord], Mapping[int, Interval]]
    title: str
    short: str
    unit: str
    length: str
    notes: tuple[str, ...]
    text: Callable[[int | float], str] = short_number
    higher_is_better: bool = False


def _counted(field: str, entry: SpeedRecord) -> dict[int, Interval]:
    return {n: Interval(value, value, value) for n, value in getattr(entry, field).items()}


_IN_STATE, _IN_ALL = "tokens already in the state", "sequence length (tokens)"

STATE = Cost(
    partial(_counted, "state_bytes"),
    title="State size",
    short="state",
    unit="bytes per sequence",
    length=_IN_STATE,
    notes=("Memory that one sequence carries from token to token.",),
    text=short_bytes,
)
FLOPS = Cost(
    partial(_counted, "flops_per_token"),
    title="FLOPs per token",
    short="FLOPs",
    unit="FLOPs per token",
    length=_IN_ALL,
    notes=("Forward FLOPs, counted, per token of a sequence of the given length.",),
)

_PHASES = {
    "decode": ("Decoding", "One token at a time, after a context of the given length.", _IN_STATE),
    "prefill": ("Prefill", "Reading a prompt of the given length.", _IN_ALL),
    "train": ("Training", "An update: forward, backward and optimizer.", _IN_ALL),
}


def speed(phase: str, batch: int | None = None) -> Cost:
    """The speed of a phase: ``decode``, ``prefill`` or ``train``.

    Args:
        phase: What is timed.
        batch: Rows at a time; by default the only batch that was timed at a length, or one row.
    """
    title, note, length = _PHASES[phase]
    rows = "" if batch is None else f", batch {batch}"
    return Cost(
        partial(_speeds, phase, batch),
        title=f"{title} speed{rows}",
        short=f"{phase} tok/s{rows}",
        unit="tokens per second",
        length=length,
        notes=(note, "Median of the rounds, with a band over its spread."),
        higher_is_better=True,
    )


def memory(phase: str, batch: int | None = None) -> Cost:
    """The peak memory of a phase; see :func:`speed`."""
    title, note, length = _PHASES[phase]
    rows = "" if batch is None else f", batch {batch}"
    return Cost(
        partial(_memory, phase, batch),
        title=f"Peak memory, {title.lower()}{rows}",
        short=f"{phase} memory{rows}",
        unit="bytes beyond model and inputs",
        length=length,
        notes=(note,),
        text=short_bytes,
    )


def costs(results: Results) -> Iterator[Cost]:
    """The costs that the results have for at least one model."""
    found = [STATE, FLOPS]
    for kind in (speed, memory):
        for phase in _PHASES:
            found += [kind(phase, batch) for batch in _batches(results, phase)]
    yield from (cost for cost in found if cost_lengths(results, cost))


def disturbance(results: Results) -> str:
    """A warning if other programs ran while speeds were measured, or an empty string."""
    busy = [entry.busy for entry in results.speed if entry.disturbed and entry.busy is not None]
    return (
        f"Other programs used up to {max(busy):.0%} of the machine while speeds were measured: "
        "the speeds are not shown."
        if busy
        else ""
    )


def best_costs(found: Mapping[str, Interval], cost: Cost) -> list[str]:
    """The model with the best cost, and all models whose spread overlaps its spread.

    Of other costs than speeds, also models that show the same number.

    None if all do.
    """
    if not found:
        return []
    if cost.higher_is_better:
        reach = max(found.values(), key=lambda own: own.middle).low
        best = [model for model, own in found.items() if own.high >= reach]
    else:
        reach = min(found.values(), key=lambda own: own.middle).high
        shown = cost.text(reach)
        best = [m for m, own in found.items() if own.low <= reach or cost.text(own.low) == shown]
    return best if len(best) < len(found) else []


def _batches(results: Results, phase: str) -> list[int | None]:
    """The batches of a phase; only ``None`` if no length was timed with several."""
    timed = {(t.length, t.batch) for e in results.speed for t in e.timings if t.phase == phase}
    single = len({length for length, _ in timed}) == len(timed)
    return [None] if single else [*sorted({batch for _, batch in timed})]


def cost_lengths(results: Results, cost: Cost) -> list[int]:
    """The lengths at which a cost is known for any model, in order."""
    return sorted({length for entry in results.speed for length in cost.values(entry)})


def common_lengths(results: Results, cost: Cost) -> list[int]:
    """The lengths at which a cost is known for every model that has it at any length."""
    known = [set(values) for entry in results.speed if (values := cost.values(entry))]
    return sorted(set.intersection(*known)) if known else []


def _timed(phase: str, batch: int | None, entry: SpeedRecord) -> list[TimingRecord]:
    """The timings of a phase, one per length."""
    found = [t for t in entry.timings if t.phase == phase and not t.skipped]
    if batch is None and len({t.length for t in found}) < len(found):
        batch = 1
    return [t for t in found if batch in (None, t.batch)]


def _speeds(phase: str, batch: int | None, entry: SpeedRecord) -> dict[int, Interval]:
    """Speeds by length; none if other programs disturbed the measurement."""
    if entry.disturbed:
        return {}
    return {
        t.length: Interval(t.tokens_per_second, t.low, t.high)
        for t in _timed(phase, batch, entry)
        if t.tokens_per_second is not None and t.low is not None and t.high is not None
    }


def _memory(phase: str, batch: int | None, entry: SpeedRecord) -> dict[int, Interval]:
    timed = _timed(phase, batch, entry)
    peaks = {t.length: t.peak_memory for t in timed if t.peak_memory is not None}
    return {length: Interval(peak, peak, peak) for length, peak in peaks.items()}
