"""Speed of several models in the same rounds, with what is left out and why."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stateline.bench.memory import available_bytes, peak_bytes
from stateline.bench.speed import Cell, Subject
from stateline.bench.timing import Call, Timing, interleave, stopwatch
from stateline.errors import InputError

MOST_SECONDS = 4.0
"""A cell is left out where one call takes longer, unless the caller says otherwise."""

MOST_PROMPT_SECONDS = 60.0
"""Decoding is left out where reading the prompt once, before it is timed, takes longer."""

MEMORY_SHARE = 0.5
"""Part of the free memory that all models together may use."""

PLACEMENT = 0.02
"""Half of the least spread, as a share of the median.

The decoding speeds of two copies of one model differ by up to 2.4 percent throughout a run, more
than the rounds show: their tensors lie at other places in memory (``examples/equal_models.py``).
"""


@dataclass(frozen=True)
class Timed:
    """One model in one cell.

    Attributes:
        cell: What was timed.
        timing: Seconds per call; ``None`` if it was left out.
        peak: Bytes that a call needs beyond the model and its inputs; ``None`` if unknown.
        skipped: Why it was left out; empty if it was not.
    """

    cell: Cell
    timing: Timing | None = None
    peak: int | None = None
    skipped: str = ""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Tokens per second, one entry per round."""
        return tuple(self.cell.tokens / s for s in self.timing.samples) if self.timing else ()

    @property
    def spread(self) -> tuple[float, float, float] | None:
        """Median of the speeds, between the two ends of their spread.

        The ends are the quartiles, or the ends of the 95 % interval of the median if it is wider,
        which is so with few rounds. They are at least :data:`PLACEMENT` away from the median.
        """
        if not self.speeds:
            return None
        speeds = sorted(self.speeds)
        first, median, third = statistics.quantiles(speeds, n=4, method="inclusive")
        rank = _interval_rank(len(speeds))
        low = min(first, speeds[rank], (1 - PLACEMENT) * median)
        return low, median, max(third, speeds[-1 - rank], (1 + PLACEMENT) * median)


def _interval_rank(count: int) -> int:
    """Rank of the lower 95 % confidence limit of the median; 0 if there are too few samples.

    The number of values below the median is binomially distributed, for any distribution of the
    values.

    Example:
        >>> [_interval_rank(n) for n in (1, 5, 6, 20, 50)]
        [0, 0, 0, 5, 17]
    """
    below = [math.comb(count, k) / 2**count for k in range(count // 2 + 1)]
    return max(0, max(k for k in range(len(below)) if sum(below[:k]) <= 0.025) - 1)


@dataclass
class _Model:
    """A subject, the longest call, and the seconds per FLOP that calls took so far, by phase."""

    subject: Subject
    most_seconds: float
    pace: dict[str, float] = field(default_factory=dict)


def measure(
    subjects: Mapping[str, Subject],
    cells: Sequence[Cell],
    seconds: float,
    tell: Callable[[Cell], object] = lambda _: None,
    most_seconds: float = MOST_SECONDS,
) -> dict[str, list[Timed]]:
    """Time all models in turns, cell by cell.

    A cell that is predicted to take too long or too much memory for a model is left out, and so is
    one that fails.

    Args:
        subjects: Models by name, all on one device.
        cells: What to time, shorter lengths first; every phase once per length and batch.
        seconds: Time for each model and cell, after the warm-up.
        tell: Called with each cell before it is measured.
        most_seconds: A model whose call takes longer is left out of a cell.

    Returns:
        By model, one entry per cell.
    """
    models = {name: _Model(subject, most_seconds) for name, subject in subjects.items()}
    found: dict[str, list[Timed]] = {name: [] for name in subjects}
    for cell in cells:
        tell(cell)
        for name, measured in _measure_cell(models, cell, seconds):
            found[name].append(measured)
    return found


def _measure_cell(
    models: Mapping[str, _Model], cell: Cell, seconds: float
) -> Iterator[tuple[str, Timed]]:
    device = next(iter(models.values())).subject.device
    free = available_bytes(device)
    share = None if free is None else MEMORY_SHARE * free / len(models)
    calls, first = dict[str, Call](), dict[str, float]()
    for name, model in models.items():
        try:
            if reason := _too_much(model, cell, share):
                raise _LeftOut(reason)
            calls[name] = model.subject.call(cell)
            first[name] = _first(model, cell, calls[name])
        except (_LeftOut, InputError, MemoryError, RuntimeError) as error:  # or no CUDA memory
            calls.pop(name, None)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            yield name, Timed(cell, skipped=reason)
    timings = interleave(calls, seconds=seconds, device=device, first=first)
    for name, timing in timings.items():
        _note(models[name], cell, timing.median)
        yield name, Timed(cell, timing, peak_bytes(calls[name], device))


class _LeftOut(Exception):
    """Why a cell is not measured."""


def _too_much(model: _Model, cell: Cell, share: float | None) -> str:
    """Why a cell is left out before anything is run; empty if it is not."""
    subject = model.subject
    if reason := subject.limit(cell):
        return reason
    needed = subject.bytes(cell)
    if share is not None and needed > share:
        return f"needs about {needed / 1e9:.1f} GB, and {share / 1e9:.1f} GB are free for it"
    checked = [(cell, model.most_seconds)]
    if cell.phase == "decode":  # it reads the prompt first
        checked.append((Cell("prefill", cell.length, 1), MOST_PROMPT_SECONDS))
    for call, limit in checked:
        predicted = model.pace.get(call.phase, 0.0) * subject.flops(call)
        if predicted > limit:
            return f"{call.phase} would take about {predicted:.0f} s a call"
    return ""


def _first(model: _Model, cell: Cell, call: Call) -> float:
    """Seconds of the first call. It may compile, so if it is slow, a second call decides."""
    elapsed_in = stopwatch(model.subject.device)
    elapsed = again = elapsed_in(call, 1)
    if model.most_seconds < elapsed <= MOST_PROMPT_SECONDS:
        again = elapsed_in(call, 1)
    if again > model.most_seconds:
        _note(model, cell, again)
        raise _LeftOut(f"{cell.phase} takes {again:.0f} s a call")
    return elapsed


def _note(model: _Model, cell: Cell, seconds: float) -> None:
    if flops := model.subject.flops(cell):
        model.pace[cell.phase] = seconds / flops
