"""Short documents joined, separate or packed, by AdamW and by Muon: what the models learn.

Run it: python examples/packing_compare.py

    python examples/packing_compare.py --steps 1000 --d_model 128 --out runs/packing

The documents are the functions of packing_speed.py: a file each. All runs train on the same number
of targets, so runs on separate documents make more updates. Trials choose the learning rates for
each way and optimizer, Muon's two rates together; the lowest and the highest rate that was tried is
marked, since a better one may lie beyond. Every model is scored on the same documents, each read
from an empty state. Pairs are compared by Student's t-test over the seeds.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from packing_speed import documents_of_library, scored

from stateline.compare import Comparison, Recipe, compare
from stateline.evaluate.tasks import evaluate
from stateline.models.checkpoint import load_any
from stateline.runs.folder import read_run
from stateline.runs.verdict import two_sided
from stateline.tasks import make_task

HELD_OUT = 65_536
RATES = {"adamw": (0.004, 0.01, 0.025, 0.0625), "muon": (0.003, 0.0125, 0.05, 0.2)}
MATRIX_RATES: dict[str, tuple[float, ...]] = {"adamw": (), "muon": (0.004, 0.016, 0.064)}
"""Learning rates that are tried, and those of the matrices that Muon updates."""


def write_documents(folder: Path) -> None:
    """A file for each document."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents_of_library()):
        (folder / f"{number:05}").write_bytes(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, score and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", default="h3*2", help="layers of the model")
    parser.add_argument("--length", type=int, default=512, help="positions in a row")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=500, help="updates of joined documents")
    parser.add_argument("--d_model", type=int, default=64, help="width")
    parser.add_argument("--seeds", type=int, default=3, help="scored runs of each setting")
    parser.add_argument("--out", type=Path, default=Path("runs/packing"), help="folder of the runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    documents = given.out / "documents"
    write_documents(documents)
    same = f"path={documents}, length={given.length}, batch_size={given.rows}"
    same += f", held_out_bytes={HELD_OUT}, longest={given.length}"
    specs = {way: f"text({same}, documents={way})" for way in ("join", "separate", "pack")}
    tasks = {way: make_task(spec) for way, spec in specs.items()}
    share = {way: scored(task) for way, task in tasks.items()}
    print({way: f"{part:.1%} of positions scored" for way, part in share.items()})

    def timed(way: str) -> str:
        steps = round(given.steps * share["join"] / share[way])
        return f"{specs[way][:-1]}, steps={steps})"

    train = {"warmup_steps": given.steps // 10, "eval_every": given.steps, "save_every": 0}
    for kind, lrs in RATES.items():
        recipe = Recipe(given.pattern, kind, train={"optimizer": kind})
        comparison = Comparison(
            [recipe],
            [timed(way) for way in tasks],
            d_model=given.d_model,
            lrs=lrs,
            muon_lrs=MATRIX_RATES[kind],
            seeds=given.seeds,
            train=train,
        )
        compare(comparison, given.out / kind, workers=0, device="cpu", timing="none")

    found: dict[tuple[str, str], list[float]] = {}
    rates: dict[tuple[str, str], str] = {}
    for place in sorted(given.out.glob("*/runs/*")):
        run = read_run(place)
        if run is None or not run.by_length:  # a trial
            continue
        way = next(way for way, spec in specs.items() if spec == run.task)
        kind = str(run.training["optimizer"])
        score = evaluate(load_any(place), tasks["pack"], given.length, batches=0)["bits_per_byte"]
        found.setdefault((kind, way), []).append(score)
        rates[kind, way] = _rates(run.training)
        print(kind, way, run.seed, run.steps, rates[kind, way], f"{score:.4f}", flush=True)
    print("\n| optimizer | documents | rate | bits per byte |\n|---|---|---|---|")
    for arm, scores in sorted(found.items()):
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        print(f"| {arm[0]} | {arm[1]} | {rates[arm]} | {mean:.3f} ± {spread:.3f} |")
    print("\n| pair | difference | p |\n|---|---|---|")
    for one, other in combinations(sorted(found), 2):
        if one[0] == other[0] or one[1] == other[1]:
            difference, p = _compared(found[one], found[other])
            print(f"| {' '.join(one)}, {' '.join(other)} | {difference:+.3f} | {p:.2g} |")


def _rates(training: Mapping[str, Any]) -> str:
    """The chosen rates, each marked if it is the lowest or the highest that was tried."""
    kind, cells = training["optimizer"], list[str]()
    for name, grid in (("lr", RATES[kind]), ("muon_lr", MATRIX_RATES[kind])):
        if grid:
            edge = " (edge)" if training[name] in (min(grid), max(grid)) else ""
            cells.append(f"{training[name]:g}{edge}")
    return ", matrices ".join(cells)


def _compared(one: list[float], other: list[float]) -> tuple[float, float]:
    """Difference of the means, and how often equal models differ as much (Student's t-test)."""
    difference = statistics.mean(one) - statistics.mean(other)
    error = math.sqrt((statistics.variance(one) + statistics.variance(other)) / len(one))
    return difference, two_sided(abs(difference) / error, 2 * len(one) - 2)


if __name__ == "__main__":
    main()
