"""One benchmark: run a suite, and record the machine and its load."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from stateline import allocator
from stateline.bench.decode import bench_decode, bench_layer_decoding
from stateline.bench.op_suite import bench_ops
from stateline.bench.peaks import measure_peaks
from stateline.bench.peers import find_models, find_peers, find_trained
from stateline.bench.record import Benchmark, Figure
from stateline.bench.suites import BenchSettings, bench_layers, bench_train
from stateline.bench.timing import use_threads, watch_load
from stateline.devices import resolve_device
from stateline.errors import InputError, check_choice
from stateline.models.presets import configure
from stateline.ops import OPS
from stateline.train.environment import environment


def measure(given: Any, command: str, tell: Callable[[str], object]) -> Benchmark:
    """Run a suite with the options of ``stateline bench``.

    ``command`` says how to measure again, for the record; ``tell`` is called with what has just
    been measured.

    Raises:
        InputError: If an option cannot be used.
    """
    device, dtype = resolve_device(given.device), getattr(torch, given.dtype)
    for kind, names, known in (
        ("op", given.only, OPS),
        ("backend", given.backends, {"auto"}.union(*(op.backends for op in OPS.values()))),
    ):
        for name in names or ():
            check_choice(kind, name, known)
    sizes = (given.tokens, given.rows or 1, given.d_model, given.threads)
    if min(*given.lengths, *given.batches, *sizes) < 1:
        raise InputError("lengths, batches, tokens, rows, d_model and threads must be at least 1")
    torch.manual_seed(0)
    with use_threads(given.threads), watch_load() as load:
        suite = _suite(given, device)
        peers = find_peers(given.against, given.patterns) if given.suite == "layers" else {}
        tell("the machine's own peaks")
        peaks = measure_peaks(device, dtype)
        settings = BenchSettings(
            device=device,
            dtype=dtype,
            lengths=given.lengths,
            tokens=given.tokens,
            d_model=given.d_model,
            seconds=given.seconds,
            backends=given.backends,
            peaks=peaks,
            peers=peers,
            rows=given.rows,
            clock=time.process_time if given.processor_time else None,
            state_dtype=None if given.state_dtype is None else getattr(torch, given.state_dtype),
        )
        figures = []
        for figure in suite(settings):
            figures.append(figure)
            tell(f"{figure.case}, {figure.work}, {figure.candidate}, length {figure.length}")
        machine = environment()
    return Benchmark(
        suite=given.suite,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=machine | {"allocator": allocator.name()},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(machine["cpu"]),
        dtype=given.dtype,
        threads=int(machine["threads"]),
        bytes_per_second=peaks.bytes_per_second,
        flops_per_second=peaks.flops_per_second,
        foreign_cores=load.foreign_cores,
        busy=load.busy,
        figures=tuple(figures),
        skipped=tuple(settings.skipped),
    )


def _suite(given: Any, device: torch.device) -> Callable[[BenchSettings], Iterator[Figure]]:
    """What to measure; modules of other projects are looked up before the first measurement."""
    if given.suite == "ops":
        return partial(bench_ops, names=given.only or list(OPS))
    if given.suite == "layers":
        run = bench_layer_decoding if given.decode else bench_layers
        return partial(run, patterns=given.patterns)
    if given.suite == "train":
        trained = find_trained(given.against, given.patterns)
        return partial(bench_train, patterns=given.patterns, tasks=given.tasks, peers=trained)
    configs = {
        name: configure(pattern, vocab_size=given.vocab_size, d_model=given.d_model)
        for name, pattern in map(_named, given.patterns)
    }
    peers = find_models(given.against, given.d_model, given.vocab_size, device)
    return partial(bench_decode, configs=configs, batches=given.batches, peers=peers)


def _named(text: str) -> tuple[str, str]:
    """Name and pattern of ``name=pattern``; a pattern without a name is its own."""
    name, _, pattern = text.partition("=")
    return (name, pattern) if pattern and name.isidentifier() else (text, text)
