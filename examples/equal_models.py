"""Check that timing finds two equal models equal: each trial times one pattern under two names.

Run it: python examples/equal_models.py --trials 20

A trial agrees in a cell if the two spreads overlap: then neither model counts as faster.
Run it on an idle machine, and again with ``--busy 1``, which keeps a core busy meanwhile.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stateline import ModelConfig
from stateline.bench.side_by_side import measure
from stateline.bench.speed import Cell, Subject
from stateline.bench.timing import use_threads, watch_load
from stateline.models.factory import make_model


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pattern", default="h3*2")
    parser.add_argument("--d_model", type=int, default=64)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy")
    return parser


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep a number of cores busy."""
    command = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def main(given: argparse.Namespace) -> None:
    """Print, for each cell, how many trials agree, and the ratios of the medians."""
    config = ModelConfig(given.pattern, vocab_size=64, d_model=given.d_model)
    cells = [
        *(Cell("prefill", length, 1) for length in given.lengths),
        *(Cell("decode", length, 1) for length in given.lengths),
        *(Cell("train", length, max(1, 4096 // length)) for length in given.lengths),
    ]
    agreed, ratios = defaultdict[Cell, int](int), defaultdict[Cell, list[float]](list)
    with busy(given.busy), use_threads(1), watch_load() as load:
        for trial in range(given.trials):
            torch.manual_seed(trial)
            pair = {name: Subject(make_model(config)) for name in ("one", "other")}
            found = measure(pair, cells, given.seconds)
            for one, other in zip(found["one"], found["other"], strict=True):
                if one.spread and other.spread:
                    (low, _, high), (other_low, _, other_high) = one.spread, other.spread
                    agreed[one.cell] += low <= other_high and other_low <= high
                    ratios[one.cell].append(one.spread[1] / other.spread[1])
    print(f"{given.pattern}, other programs used {load.foreign_cores} cores")
    for cell in cells:
        line = {"agreed": agreed[cell], "of": given.trials}
        line |= {"ratio": [round(min(ratios[cell]), 3), round(max(ratios[cell]), 3)]}
        print(*cell, json.dumps(line))


if __name__ == "__main__":
    main(arguments().parse_args())
