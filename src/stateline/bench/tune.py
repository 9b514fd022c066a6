"""Measuring the thresholds of :mod:`stateline.ops.thresholds` on this machine."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stateline.bench.timing import Call, interleave
from stateline.errors import InputError
from stateline.files import write_text
from stateline.ops import OPS

SHAPE = (4, 1024, 64)
"""Batch, length and channels of the calls."""

TRAINING = (16, 32)
"""Batch, and modes of a channel, of the calls that are typical of training."""


@dataclass(frozen=True)
class Crossing:
    """A size up to which one implementation is faster than another.

    Attributes:
        name: Of the threshold.
        sizes: What is tried, rising.
        below: The call that is faster for small sizes, given a size.
        above: The call that is faster for large ones.
        inclusive: Whether the threshold is the last size of ``below``, or the first of ``above``.
    """

    name: str
    sizes: Sequence[int]
    below: Callable[[int], Call]
    above: Callable[[int], Call]
    inclusive: bool = True


def tune(seconds: float, tell: Callable[[str], object]) -> dict[str, int]:
    """Measure all thresholds.

    Args:
        seconds: Time for each call of each size.
        tell: Called with what is being measured.

    Returns:
        The thresholds by name.

    Raises:
        InputError: If numba is not installed: there is then nothing to choose between.
    """
    if reason := OPS["attention"].module("numba")[1]:
        raise InputError(f"thresholds decide between numba and PyTorch, but {reason}")
    found = {}
    for crossing in _crossings():
        tell(crossing.name)
        found[crossing.name] = _measure(crossing, seconds)
    return found


def store(found: dict[str, int], file: Path) -> None:
    """Write the thresholds to a file that :data:`stateline.ops.thresholds.VARIABLE` may name."""
    write_text(file, json.dumps(found, indent=1, sort_keys=True) + "\n")


def _measure(crossing: Crossing, seconds: float) -> int:
    """The threshold with the least total time over all sizes."""
    pairs = []
    with torch.no_grad():
        for size in crossing.sizes:
            calls = {"below": crossing.below(size), "above": crossing.above(size)}
            timed = interleave(calls, seconds=seconds)
            pairs.append((timed["below"].median, timed["above"].median))
    costs = [
        sum(below for below, _ in pairs[:cut]) + sum(above for _, above in pairs[cut:])
        for cut in range(len(pairs) + 1)
    ]
    cut = costs.index(min(costs))  # so many sizes belong below
    if crossing.inclusive:
        return crossing.sizes[cut - 1] if cut else 0
    return crossing.sizes[cut] if cut < len(pairs) else crossing.sizes[-1] + 1


def _crossings() -> Iterator[Crossing]:
    attention, short = (OPS[name].module("numba")[0] for name in ("attention", "short_conv"))
    torch_attention, torch_short = (
        OPS[name].module("torch")[0] for name in ("attention", "short_conv")
    )
    yield Crossing(
        "attention.narrow_head",
        (4, 8, 16, 32, 64),
        lambda d: _attend(attention.attention, d),
        lambda d: _attend(torch_attention.attention, d),
    )
    yield Crossing(
        "attention.few_queries",
        (1, 2, 4, 8, 16),
        lambda n: _look_up(attention.attend_few, n),
        lambda n: _look_up(attention.attend_many, n),
    )
    diagonal = OPS["diagonal_ssm"].module("numba")[0]
    yield Crossing(
        "diagonal_ssm.by_response",
        (1, 2, 4, 8),
        lambda n: _filter(diagonal.by_response, n),
        lambda n: _filter(diagonal.by_recurrence, n),
    )
    taps = (4, 8, 16, 32, 64, 128, 256, 512)
    yield Crossing(
        "short_conv.numba_taps",
        taps,
        lambda n: _convolve(short.short_conv, n),
        lambda n: _convolve(OPS["fft_conv"].module("torch")[0].fft_conv, n),
    )
    yield Crossing(
        "short_conv.fft_taps",
        taps,
        lambda n: _convolve(torch_short.by_taps, n),
        lambda n: _convolve(OPS["fft_conv"].module("torch")[0].fft_conv, n),
        inclusive=False,
    )


def _filter(op: Callable[..., Tensor], tokens_per_mode: int) -> Call:
    """Forward and backward: training is where batches are short and many."""
    (batch, modes), channels = TRAINING, SHAPE[-1]
    u = torch.randn(batch, tokens_per_mode * modes, channels)
    log_a = -torch.rand(channels, modes, 2)
    inputs = [x.requires_grad_() for x in (u, log_a, *torch.randn(2, channels, modes, 2))]

    @torch.enable_grad()
    def run() -> None:
        torch.autograd.grad(op(*inputs).sum(), inputs)

    return run


def _attend(op: Callable[..., Tensor], d_head: int) -> Call:
    batch, length, channels = SHAPE
    q, k, v = torch.randn(3, batch, length, max(1, channels // d_head), d_head)
    return lambda: op(q, k, v, None, None, None)


def _look_up(op: Callable[..., Any], queries: int) -> Call:
    batch, length, channels = SHAPE
    q = torch.randn(batch, queries, 1, channels)
    k, v = torch.randn(2, batch, length, 1, channels)
    start = torch.full((batch,), length - queries)
    return lambda: op(q, k, v, start)


def _convolve(op: Callable[..., Tensor], taps: int) -> Call:
    u, kernel = torch.randn(SHAPE), torch.randn(SHAPE[-1], taps)
    return lambda: op(u, kernel)
