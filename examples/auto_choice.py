"""Compare the backends that ``auto`` chooses with every single one, as on three processors.

Run it: python examples/auto_choice.py --out benchmarks/results/NAME

``stateline bench ops`` runs as on this processor, on one with AVX2 alone and on one with plain SSE.
It measures processor time of one thread, all backends in turns. The table has the cases in which
``auto`` takes longest beside the fastest backend that was asked for by name. Ops in which it takes
more than ``--near`` times as long are measured again, for three times as long, and the second time
counts: the kernels are the same, so a difference that disappears is noise.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from stateline.bench.record import Benchmark, Figure
from stateline.bench.show import read_benchmark
from stateline.files import write_text

PROCESSORS = {
    "own": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma",
    },
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
    },
}
"""Environment variables of each processor, as in the Makefile."""


def measured(processor: str, seconds: float, *options: str) -> Benchmark:
    """The measurements of ``stateline bench ops`` as on one of the processors."""
    command = [sys.executable, "-m", "stateline", "bench", "ops", "--processor_time", "--force"]
    with tempfile.TemporaryDirectory() as folder:
        place = ["--seconds", str(seconds), "--out", folder]
        subprocess.run(
            [*command, *place, *options],
            env={**os.environ, **PROCESSORS[processor]},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return read_benchmark(Path(folder) / "ops.json")


def ratios(found: Benchmark) -> Iterator[tuple[float, Figure, Figure]]:
    """Time of ``auto`` over the time of the fastest other backend, and the two, by case."""
    for _, group in groupby(found.figures, key=lambda f: (f.case, f.length, f.work)):
        by_name = {figure.candidate: figure for figure in group}
        auto = by_name.pop("auto")
        best = min(by_name.values(), key=lambda figure: figure.seconds)
        yield auto.seconds / best.seconds, auto, best


def with_repeats(processor: str, given: argparse.Namespace) -> Benchmark:
    """The measurements; ops near the bound are measured again, for longer."""
    lengths = ["--lengths", *map(str, given.lengths)]
    only = ["--only", *given.only] if given.only else []
    found = measured(processor, given.seconds, *lengths, *only)
    near = sorted({auto.case for ratio, auto, _ in ratios(found) if ratio > given.near})
    if not near:
        return found
    again = measured(processor, 3 * given.seconds, *lengths, "--only", *near)
    others = tuple(figure for figure in found.figures if figure.case not in near)
    return msgspec.structs.replace(found, figures=others + again.figures)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the records and print the table."""
    given = parser().parse_args(arguments)
    for processor in given.processors:
        found = with_repeats(processor, given)
        command = f"python examples/auto_choice.py --processors {processor}"
        found = msgspec.structs.replace(found, command=command)
        if given.out:
            text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
            write_text(Path(given.out) / f"auto-{processor}.json", text + "\n")
        rows = sorted(ratios(found), key=lambda row: -row[0])
        over = sum(ratio > 1.03 for ratio, _, _ in rows)
        print(f"as {processor}: {len(rows)} cases, {over} above 1.03")
        for ratio, auto, best in rows[: given.rows]:
            print(
                f"  {ratio:5.2f}  {auto.case}, {auto.work}, {auto.batch} x {auto.length}: "
                f"{1e3 * auto.seconds:.3g} ms, {best.candidate} {1e3 * best.seconds:.3g} ms",
                flush=True,
            )


def parser() -> argparse.ArgumentParser:
    """Declare the options."""
    options = argparse.ArgumentParser()
    options.add_argument("--processors", nargs="+", default=list(PROCESSORS), choices=PROCESSORS)
    options.add_argument("--only", nargs="+", help="ops to measure")
    options.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096])
    options.add_argument("--seconds", type=float, default=0.4, help="for each backend of a case")
    options.add_argument("--near", type=float, default=1.02)
    options.add_argument("--rows", type=int, default=10, help="of the table per processor")
    options.add_argument("--out", help="folder for the records, auto-PROCESSOR.json")
    return options


if __name__ == "__main__":
    main()
