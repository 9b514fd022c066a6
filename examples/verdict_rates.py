"""How often equal models are told apart, and different ones are, by simulated scores.

Run it: python examples/verdict_rates.py --families 2000

The first table has the share of families of 2, 3 and 5 equal models, in percent, of which any pair
is told apart; the second one the share of pairs that are told apart, of 3 models of which one is
better. With ``--looks`` seeds are added one by one from the third, and judged after each.
"""

import argparse
from collections.abc import Callable

import numpy as np

from stateline.runs.verdict import FIRST_LOOK, ScoreKind, judge

PROBLEMS, GOAL, CHANCE = 1024, 0.95, 0.25
SHARES = ScoreKind(higher_is_better=True, problems=PROBLEMS, solved_at=GOAL)
LOSSES = ScoreKind(higher_is_better=False)

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def counted(rng: np.random.Generator, share: np.ndarray) -> np.ndarray:
    """Shares of right answers, with the sampling error of the problems."""
    return rng.binomial(PROBLEMS, np.clip(share, 0, 1)) / PROBLEMS


def kinds(solved: float, low: float = 0.3) -> Draw:
    """Some seeds solve the task, the others do not."""
    return lambda rng, size: counted(
        rng, np.where(rng.random(size) < solved, 0.99, low + rng.normal(0, 0.02, size))
    )


SHAPES: dict[str, tuple[ScoreKind, Draw]] = {
    "normal": (LOSSES, lambda rng, size: rng.normal(2.0, 0.05, size)),
    "heavy tail (t, 2 degrees)": (LOSSES, lambda rng, size: 2 + 0.05 * rng.standard_t(2, size)),
    "skewed (log-normal)": (LOSSES, lambda rng, size: rng.lognormal(0, 1, size)),
    "half of the seeds solve": (SHARES, kinds(0.5)),
    "most of the seeds solve": (SHARES, kinds(0.8)),
    "at the ceiling": (SHARES, lambda rng, size: counted(rng, rng.normal(1.0, 0.01, size))),
    "at chance": (SHARES, lambda rng, size: counted(rng, np.full(size, CHANCE))),
    "flat": (LOSSES, lambda rng, size: rng.uniform(1.9, 2.1, size)),
    "around the goal": (SHARES, lambda rng, size: counted(rng, rng.normal(GOAL, 0.04, size))),
    "two kinds below the goal": (
        SHARES,
        lambda rng, size: counted(rng, rng.choice([0.3, 0.6], size) + rng.normal(0, 0.005, size)),
    ),
}
"""Shapes of the distribution of a score over seeds."""

PLANTED: dict[str, tuple[ScoreKind, Draw, Draw]] = {
    f"{times} deviations": (
        LOSSES,
        lambda rng, size, times=times: rng.normal(2.0 - 0.05 * times, 0.05, size),
        SHAPES["normal"][1],
    )
    for times in (2, 4, 8)
} | {
    "0.99 against 0.30": (SHARES, kinds(1.0), kinds(0.0)),
    "0.80 against 0.60": (
        SHARES,
        lambda rng, size: counted(rng, rng.normal(0.8, 0.03, size)),
        lambda rng, size: counted(rng, rng.normal(0.6, 0.03, size)),
    ),
    "all solve against 1 of 4": (SHARES, kinds(1.0), kinds(0.25)),
}
"""The scores of a better model and of others."""


def told(kind: ScoreKind, scores: np.ndarray, looks: int) -> set[tuple[str, str]]:
    """The pairs that are told apart, of models by row."""
    named = {str(model): own for model, own in enumerate(scores.tolist())}
    return judge(named, kind, looks=looks).better


def false_rate(shape: str, models: int, seeds: int, families: int, *, look: bool) -> float:
    """Share of families of equal models of which any pair is told apart."""
    kind, draw = SHAPES[shape]
    rng, looks = np.random.default_rng([models, seeds]), seeds - FIRST_LOOK + 1 if look else 1
    return (
        sum(bool(told(kind, draw(rng, (models, seeds)), looks)) for _ in range(families)) / families
    )


def power(planted: str, seeds: int, families: int, *, look: bool) -> float:
    """Share of the pairs of a better model with two others that are told apart."""
    kind, better, worse = PLANTED[planted]
    rng, looks = np.random.default_rng(seeds), seeds - FIRST_LOOK + 1 if look else 1
    found = 0
    for _ in range(families):
        scores = np.concatenate([better(rng, (1, seeds)), worse(rng, (2, seeds))])
        found += len({("0", "1"), ("0", "2")} & told(kind, scores, looks))
    return found / (2 * families)


def main(families: int, seeds: list[int], shapes: list[str], *, look: bool) -> None:
    """Print both tables in Markdown, the second one for all shapes only."""
    heads = " | ".join(f"{n} seeds" for n in seeds)
    print(f"| equal models | {heads} |\n|---|{'---|' * len(seeds)}")
    for shape in shapes or SHAPES:
        cells = [
            ", ".join(
                f"{100 * false_rate(shape, m, n, families, look=look):.1f}" for m in (2, 3, 5)
            )
            for n in seeds
        ]
        print(f"| {shape} | {' | '.join(cells)} |")
    if shapes:
        return
    print(f"\n| different models | {heads} |\n|---|{'---|' * len(seeds)}")
    for name in PLANTED:
        cells = [f"{100 * power(name, n, families // 4, look=look):.0f}" for n in seeds]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 6, 10])
    parser.add_argument("--looks", action="store_true", help="judge after every seed")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="by default all")
    given = parser.parse_args()
    main(given.families, given.seeds, given.shapes or [], look=given.looks)
