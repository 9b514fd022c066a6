"""Short documents joined, separate or packed; and AdamW or Muon: what the models learn.

Run it: python examples/packing_compare.py

    python examples/packing_compare.py --steps 600 --d_model 128 --out runs/packing

The documents are those of packing_speed.py: a file each. All runs train on the same number of
targets, so those of separate documents make more updates. Learning rates are chosen for each way
and each optimizer by trials, Muon's two rates together. Every model is scored on the same
documents, each read from an empty state.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from packing_speed import documents_of_library, scored

from stateline.compare import Comparison, Recipe, compare
from stateline.evaluate.tasks import evaluate
from stateline.models.checkpoint import load_any
from stateline.runs.folder import read_run
from stateline.tasks import make_task

HELD_OUT = 65_536


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
    parser.add_argument("--steps", type=int, default=300, help="updates, but of separate documents")
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

    adamw, muon = (
        Recipe(given.pattern, kind, train={"optimizer": kind}) for kind in ("adamw", "muon")
    )
    train = {"warmup_steps": given.steps // 10, "eval_every": given.steps, "save_every": 0}
    for folder, recipes, ways in (
        ("optimizers", [adamw, muon], ["pack"]),
        ("ways", [adamw], ["join", "separate"]),
    ):
        asked = [timed(way) for way in ways]
        settings = {"d_model": given.d_model, "seeds": given.seeds, "train": train}
        comparison = Comparison(recipes, asked, **settings)
        compare(comparison, given.out / folder, workers=0, device="cpu", timing="none")

    found: dict[tuple[str, str], list[float]] = {}
    rates: dict[tuple[str, str], str] = {}
    for place in sorted(given.out.glob("*/runs/*")):
        run = read_run(place)
        if run is None or not run.by_length:  # a trial
            continue
        way = next(way for way, spec in specs.items() if spec == run.task)
        kind = run.training["optimizer"], way
        model = load_any(place)
        score = evaluate(model, tasks["pack"], given.length, batches=0)["bits_per_byte"]
        found.setdefault(kind, []).append(score)
        second = run.training["muon_lr"]
        rates[kind] = f"{run.training['lr']:g}" + (f", matrices {second:g}" if second else "")
        print(*kind, run.seed, run.steps, rates[kind], f"{score:.4f}", flush=True)
    print("\n| optimizer | documents | rate | bits per byte |\n|---|---|---|---|")
    for kind, scores in sorted(found.items()):
        spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
        mean = statistics.mean(scores)
        print(f"| {kind[0]} | {kind[1]} | {rates[kind]} | {mean:.3f} ± {spread:.3f} |")


if __name__ == "__main__":
    main()
