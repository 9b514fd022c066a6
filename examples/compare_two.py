"""Compare two architectures from Python, like `stateline compare`.

Run it: python examples/compare_two.py
"""

from pathlib import Path

from rich.console import Console

from stateline.compare import Comparison, compare
from stateline.reports import print_results, write_report

COMMAND = "python examples/compare_two.py"


def main(folder: Path, steps: int) -> None:
    """Train both at the same size on one task, print the table, and write the report."""
    comparison = Comparison(
        patterns=["attention(position=hard_alibi, n_heads=8)*2", "h3*2"],
        tasks=["copying"],
        d_model=32,
        steps=steps,
        protocol="quick",
    )
    results = compare(comparison, folder, command=COMMAND)
    print_results(results, Console())
    write_report(results, folder / "report.html")
    for run in results.runs:
        at_length, scores = next(iter(run.by_length.items()))
        print(f"{run.model}: {scores['string_accuracy']:.3f} at length {at_length}")


if __name__ == "__main__":
    main(Path("runs/compare_two"), steps=400)
