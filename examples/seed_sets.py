"""See whether what a comparison concludes from some seeds holds for others.

Run it: python examples/seed_sets.py runs/mine

The folder holds a comparison with four or more seeds per task (``--seeds 6``). Its seeds are split
into halves in every way, and each half is judged as the report would judge it alone.
"""

import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

from stateline.reports import read_results
from stateline.reports.records import kind_of, runs_of, score
from stateline.runs.results import Results, TaskRecord
from stateline.runs.verdict import judge

Claims = set[tuple[str, str]]


def claims(results: Results, task: TaskRecord, seeds: set[int]) -> Claims:
    """The pairs of models of which the first is called better, judged by some of the seeds."""
    scores = {
        model: [
            score(run, task, task.train_length)
            for run in runs_of(results, model, task)
            if run.seed in seeds
        ]
        for model in results.models
    }
    return judge(scores, kind_of(task, task.train_length)).better


def main(folder: Path) -> None:
    """Print, for each task, how often two halves claim the same, and how often the contrary."""
    results = read_results(folder)
    for task in results.tasks:
        seeds = sorted({run.seed for run in results.runs if run.task == task.spec})
        halves = [{seeds[0], *half} for half in combinations(seeds[1:], len(seeds) // 2 - 1)]
        found = Counter[str]()
        for half in halves:
            first, second = (claims(results, task, own) for own in (half, {*seeds} - half))
            contrary = {(worse, better) for better, worse in second}
            found.update(both=len(first & second), one=len(first ^ second))
            found.update(contrary=len(first & contrary))
        print(
            f"{task.title}: {len(halves)} pairs of halves: {found['both']} claims in both, "
            f"{found['one']} in one alone, {found['contrary']} contradicted by the other"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
