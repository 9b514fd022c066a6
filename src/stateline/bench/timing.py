"""Timing of several candidates side by side: rotated rounds, medians, and whether to trust them."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stateline.devices import cuda_seconds
from stateline.workers import cores

Call = Callable[[], object]

SAMPLE_SECONDS = 0.02
"""A shorter call is repeated within a sample, so that the clock's own cost does not count."""

LEAST_ROUNDS = 5
MOST_FOREIGN_LOAD = 0.1
"""Cores that other programs may use on average before timings are not to be trusted."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one candidate.

    Attributes:
        first: The first call: compilation, autotuning and allocation are in it.
        samples: Seconds per call, one entry per round.
    """

    first: float
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the rounds; of a single round, its time."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high


@dataclass
class Load:
    """The load of other programs while a measurement ran.

    Attributes:
        foreign_cores: Cores that other programs used on average; ``None`` where the operating
            system does not report it.
    """

    foreign_cores: float | None = None

    @property
    def busy(self) -> bool:
        """True if other programs disturbed the measurement."""
        return self.foreign_cores is not None and self.foreign_cores > MOST_FOREIGN_LOAD


def interleave(
    candidates: Mapping[str, Call],
    *,
    seconds: float = 0.5,
    rounds: int | None = None,
    device: torch.device | str = "cpu",
    first: Mapping[str, float] | None = None,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """Time all candidates in turns, so that a disturbance affects all of them equally.

    Every candidate is called once by itself (its ``first``) and once more to warm up. Then each
    round takes one sample of every candidate, and the round begins with another candidate each
    time.

    Args:
        candidates: What to call, by name.
        seconds: Time to spend on each candidate, after the warm-up; at least five rounds are made.
        rounds: Make exactly this number of rounds instead, with one call per sample.
        device: Where they compute; a sample ends when the device has finished.
        first: Seconds of the first call of each, if the caller has made it; they are then only
            warmed up.
        clock: Measures seconds on a CPU, by default wall-clock time; ``time.process_time`` counts
            the work of this process alone.
    """
    if not candidates:
        return {}
    elapsed_in = stopwatch(torch.device(device), clock)
    begun, repeats = dict(first or {}), dict.fromkeys(candidates, 1)
    for name, call in candidates.items():
        if name not in begun:
            begun[name] = elapsed_in(call, 1)
        warm = elapsed_in(call, 1)
        if rounds is None:
            repeats[name] = max(1, round(SAMPLE_SECONDS / max(warm, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, spent = list(candidates), 0.0

    def done() -> bool:
        made = min(map(len, samples.values()))
        if rounds is not None:
            return made >= rounds
        return made >= LEAST_ROUNDS and spent >= seconds * len(order)

    while not done():
        for name in order:
            elapsed = elapsed_in(candidates[name], repeats[name])
            samples[name].append(elapsed / repeats[name])
            spent += elapsed
        order = [*order[1:], order[0]]
    return {name: Timing(begun[name], tuple(samples[name])) for name in candidates}


def stopwatch(
    device: torch.device, clock: Callable[[], float] | None = None
) -> Callable[[Call, int], float]:
    """A function that measures the seconds of some calls, one after the other.

    On CUDA devices it is :func:`stateline.devices.cuda_seconds`.
    """
    if device.type == "cuda":
        return partial(cuda_seconds, device=device)
    wait, clock = waiter(device), clock or time.perf_counter

    def by_clock(call: Call, repeats: int) -> float:
        wait()
        started = clock()
        for _ in range(repeats):
            call()
        wait()
        return clock() - started

    return by_clock


def waiter(device: torch.device) -> Call:
    """A function that returns when the device has done all work it was given."""
    if device.type in ("cpu", "meta"):
        return lambda: None
    module = torch.get_device_module(device)
    return partial(module.synchronize, device) if device.type == "cuda" else module.synchronize


@contextmanager
def watch_load() -> Iterator[Load]:
    """Tell, after the ``with`` block, how many cores other programs used during it."""
    load = Load()
    busy, own, started = _busy_seconds(), _own_seconds(), time.perf_counter()
    yield load
    now = _busy_seconds()
    if busy is not None and now is not None:
        elapsed = max(time.perf_counter() - started, 1e-9)
        foreign = (now - busy) - (_own_seconds() - own)
        load.foreign_cores = max(0.0, foreign / elapsed)


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine started (Linux only)."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, soft_irq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return sum(os.times()[:4])  # of this process and its children


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let PyTorch, and the kernels that follow it, use ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
