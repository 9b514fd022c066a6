"""Check whether the conclusions of a comparison from some seeds hold for other seeds.

Run it: python examples/seed_sets.py runs/mine

The folder holds a comparison with four or more seeds per task (``--seeds 6``). Its seeds are split
into halves in every way, and each half is judged as the report would judge it alone. With a number,
as in ``python examples/seed_sets.py runs/mine 4``, the seeds are split into consecutive sets, each
of that size, and for each set, the claims of the page and its decisions are printed.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from msgspec.structs import replace

from stateline.reports import read_results
from stateline.reports.answers import Answer, answers
from stateline.reports.budgets import read_budget
from stateline.reports.decision import decisions
from stateline.reports.records import middle
from stateline.runs.results import Results

Claims = set[tuple[str, str]]

LIMITS = ("", "state<=64KiB")
"""Budgets of the decisions; an empty text is none."""


def of_seeds(results: Results, seeds: set[int]) -> Results:
    """The results of some seeds."""
    return replace(results, runs=[run for run in results.runs if run.seed in seeds])


def trained(results: Results) -> Iterator[Answer]:
    """The answers at the training lengths."""
    return (answer for answer in answers(results).every if not answer.beyond)


def stated(results: Results) -> dict[str, Claims]:
    """For each task, and each size, the pairs of which the first model is clearly better."""
    return {answer.label: answer.verdict.better for answer in trained(results)}


def medians(results: Results) -> dict[tuple[str, str], float]:
    """The median score of each model on each task, the larger the better."""
    return {
        (answer.label, model): (1 if answer.task.higher_is_better else -1) * middle(scores)
        for answer in trained(results)
        for model, scores in answer.scores.items()
    }


def decided(results: Results) -> dict[str, str]:
    """The best model by task, length and budget."""
    return {
        f"{row.task} at {row.length.split()[0]}{f' within {limit}' if limit else ''}": row.best
        for limit in LIMITS
        for row in decisions(answers(results, [read_budget(limit)] if limit else []))
        if row.best
    }


def sets_of(results: Results, size: int) -> Iterator[set[int]]:
    """Consecutive sets of seeds of one size; an incomplete set is left out."""
    seeds = sorted({run.seed for run in results.runs})
    for start in range(0, len(seeds) - size + 1, size):
        yield set(seeds[start : start + size])


def compare_sets(results: Results, size: int) -> None:
    """Print what each set claims and decides, and how often another set disagrees."""
    sets = list(sets_of(results, size))
    parts = [of_seeds(results, seeds) for seeds in sets]
    claims, scores, answers = (list(map(f, parts)) for f in (stated, medians, decided))
    contrary = against = 0
    for seeds, own in zip(sets, claims, strict=True):
        pairs = [(task, *pair) for task, found in own.items() for pair in sorted(found)]
        told = "; ".join(f"{task}: {better} > {worse}" for task, better, worse in pairs)
        print(f"seeds {min(seeds)} to {max(seeds)}: {len(pairs)} claims: {told}")
        contrary += sum((w, b) in other[task] for task, b, w in pairs for other in claims)
        against += sum(m[task, w] >= m[task, b] for task, b, w in pairs for m in scores)
    print(f"{contrary} claims of one set contradict a claim of another")
    print(f"{against} claims have the medians of another set against them")
    for question, right in decided(results).items():
        found = [answer.get(question, "") for answer in answers]
        same = found.count(right)
        others = sorted({answer for answer in found if answer != right})
        more = f", else {' or '.join(filter(None, others)) or 'none'}" if others else ""
        print(f"{question}: {right or 'none'} from all seeds, {same} of {len(sets)} sets{more}")


def compare_halves(results: Results) -> None:
    """Print, for each task, how often two halves claim the same, and how often the contrary."""
    for task in results.tasks:
        alone = replace(
            results, tasks=[task], runs=[r for r in results.runs if r.task == task.spec]
        )
        seeds = sorted({run.seed for run in alone.runs})
        halves = [{seeds[0], *half} for half in combinations(seeds[1:], len(seeds) // 2 - 1)]
        found = Counter[str]()
        for half in halves:
            first, second = (
                {
                    (label, *pair)
                    for label, pairs in stated(of_seeds(alone, own)).items()
                    for pair in pairs
                }
                for own in (half, {*seeds} - half)
            )
            contrary = {(label, worse, better) for label, better, worse in second}
            found.update(both=len(first & second), one=len(first ^ second))
            found.update(contrary=len(first & contrary))
        print(
            f"{task.title}: {len(halves)} pairs of halves: {found['both']} claims in both, "
            f"{found['one']} in one alone, {found['contrary']} contradicted by the other"
        )


def main(folder: Path, size: int = 0) -> None:
    """Compare sets of a size, or all halves."""
    results = read_results(folder)
    if size:
        compare_sets(results, size)
    else:
        compare_halves(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
