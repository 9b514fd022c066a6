"""Probe released Transformers as in section 4 of Repeat After Me, and record the table of its page.

Run it: python examples/pretrained_probes.py MODELS/smollm2 MODELS/gemma3 --data data
            --record benchmarks/papers/repeat_after_me/pretrained.json

Each model answers the same 20 examples of a phone book (figure 1c), of copies of text and of
shuffled text (figure 7), of copies of random letters (figure 10), and of the lookup of n-grams in
them. A started run goes on where it stopped. No released weights of Mamba can be reached from here,
so the other half of the paper's comparison is missing. With the folder of a Mamba, or
``hf:FOLDER``, the same command measures it.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path

from stateline.papers.record import RecordedRow, TableRecord, write_table
from stateline.probe import Material, Plan, Settings, load_reader, run_probes
from stateline.probe.results import Point
from stateline.probe.tasks import PROBES
from stateline.train.environment import environment

EXAMPLES = 20

POINTS = [
    *[(task, 20) for task in ("phone_book", "copy", "shuffled_copy", "letters", "ngram_lookup")],
    *[("letters", 50), ("ngram_lookup", 50), ("phone_book", 70)],
    *[("copy", 100), ("shuffled_copy", 100)],
]


def heading(task: str, length: int) -> str:
    """The heading of a column, such as ``Phone book, 20 entries``."""
    return f"{PROBES[task].title}, {length} {PROBES[task].unit}"


def main(given: argparse.Namespace) -> None:
    """Measure what is missing, one length after the other, and record it."""
    material, settings = Material(given.data), Settings(error=0.0, examples=EXAMPLES, rows=10)
    found: dict[tuple[str, str, int], Point] = {}
    for task, length in POINTS:
        plan = Plan(given.models, [task], [length], settings)
        results = run_probes(plan, material, load_reader, given.out)
        for model in given.models:
            point = results.find(model, task, length)
            assert point is not None
            found[model, task, length] = point
            print(f"{model}  {heading(task, length)}: {point.exact_match:.3f} ", end="")
            print(f"in {point.seconds:.0f} s {point.skipped}", flush=True)
    if given.record:
        record = TableRecord(
            table="",
            size="laptop",
            command=f"python examples/pretrained_probes.py {' '.join(given.models)}",
            created=datetime.now(UTC).date().isoformat(),
            environment={**environment()},
            columns=[heading(*point) for point in POINTS],
            rows=[row(model, [found[model, *point] for point in POINTS]) for model in given.models],
            solved={heading(*point): 100.0 for point in POINTS},
            unit="examples",
        )
        write_table(given.record, record)


def row(model: str, points: list[Point]) -> RecordedRow:
    """The answers of a model: 100 for each that is exact, 0 for the others."""
    exact = [round(point.exact_match * EXAMPLES) for point in points]
    values: list[list[float | None]] = [[100.0] * n + [0.0] * (EXAMPLES - n) for n in exact]
    return RecordedRow(
        label=Path(model).name,
        seeds=[*range(EXAMPLES)],
        values=values,
        seconds=round(sum(point.seconds for point in points), 1),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", type=Path, default=Path("runs/probes"))
    parser.add_argument("--record", type=Path)
    main(parser.parse_args())
