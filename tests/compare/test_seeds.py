"""Seeds are added until models are told apart: the rate of errors, and the number of seeds."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stateline.compare import Comparison, compare, plan
from stateline.compare.seeds import Seeds
from stateline.errors import InputError
from stateline.runs.results import RunRecord, to_json
from stateline.runs.start import Start
from stateline.runs.verdict import ERROR_RATE, ScoreKind, judge
from stateline.tasks import make_task

TRIALS, MOST, PROBLEMS = 200, 6, 1024

# Jobs, tasks and runs are stand-ins with the attributes that seeds read.
pytestmark = pytest.mark.usefixtures("unannotated")

Draw = Callable[[np.random.Generator, int], Any]


def task(**changes: Any) -> Any:
    known = {"metric": "accuracy", "train_length": 8, "higher_is_better": True, "solved_at": 0.95}
    known |= {"problems": 0 if "metric" in changes else PROBLEMS}
    return SimpleNamespace(**known | changes)


def planted(
    draws: dict[str, Draw], seed: int, of: Any, wanted: Any = "best", sized: bool = False
) -> tuple[Any, int]:
    """Run a comparison of models whose scores are drawn: the verdict, and the seeds spent.

    If they are ``sized``, each model has a size of its own.
    """
    rng = np.random.default_rng(seed)
    jobs: list[Any] = [
        SimpleNamespace(
            **{"task": "t", "size": place, "family": "f" if sized else "", "label": m},
            training=SimpleNamespace(seed=s),
        )
        for place, m in enumerate(draws)
        for s in range(MOST)
    ]
    scores = {m: [float(v) for v in draw(rng, MOST)] for m, draw in draws.items()}
    seeds, done = Seeds(wanted, jobs, {"t": of}), list[Any]()
    while waiting := [job for job in jobs if seeds.is_asked(job) and job not in done]:
        for job in waiting:
            value: float | None = scores[job.label][job.training.seed]
            value = None if value != value else value  # training diverged
            seeds.after(job, SimpleNamespace(by_length={8: {of.metric: value}}))  # type: ignore[arg-type]
            done.append(job)
    spent = {m: own[: sum(job.label == m for job in done)] for m, own in scores.items()}
    kind = ScoreKind(of.higher_is_better, PROBLEMS, of.solved_at)
    return judge(spent, kind, looks=seeds.looks), len(done)


def normal(mean: float, spread: float) -> Draw:
    return lambda rng, n: np.clip(rng.normal(mean, spread, n), 0, 1)


def lucky(share: float) -> Draw:
    """Some seeds solve the task and the others do not."""
    return lambda rng, n: np.where(rng.random(n) < share, 0.99, 0.3) + rng.normal(0, 0.003, n)


def measured(mean: float) -> Draw:
    return lambda rng, n: rng.binomial(PROBLEMS, np.full(n, mean)) / PROBLEMS


EQUAL: dict[str, Draw] = {
    "spread": normal(0.6, 0.05),
    "exact": measured(0.9),
    "half of the seeds solve it": lucky(0.5),
    "most of the seeds solve it": lucky(0.8),
}
UNEQUAL: dict[str, tuple[Draw, Draw]] = {
    "far": (measured(0.99), normal(0.6, 0.02)),
    "near": (normal(0.97, 0.004), normal(0.90, 0.01)),
    "solved or not": (measured(0.999), measured(0.4)),
    "one decimal": (normal(0.80, 0.01), normal(0.70, 0.02)),
}


@pytest.mark.parametrize("models", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_models_are_told_apart_as_rarely_as_promised(models: int) -> None:
    """More than 19 wrong ones of 200 comparisons have a probability below 0.3 % at 5 %."""
    wrong = 0
    for trial in range(TRIALS):
        draw = list(EQUAL.values())[trial % len(EQUAL)]
        found, _ = planted(dict.fromkeys("abcd"[:models], draw), trial, task())
        wrong += bool(found.better)
    assert wrong <= 19
    assert ERROR_RATE * TRIALS == 10


def test_unequal_models_are_told_apart_with_fewer_seeds_than_six_for_all() -> None:
    right, spent = 0, 0
    for trial in range(TRIALS):
        best, other = list(UNEQUAL.values())[trial % len(UNEQUAL)]
        found, seeds = planted({"best": best, "other": other}, trial, task())
        assert ("other", "best") not in found.better
        right += found.winner == "best"
        spent += seeds
    assert right >= 0.95 * TRIALS
    assert spent <= 0.75 * TRIALS * 2 * MOST


def test_models_that_are_clearly_worse_get_no_more_seeds() -> None:
    """Of three models, four seeds that agree are enough."""
    draws = {"a": normal(0.6, 0.02), "b": normal(0.6, 0.02), "far": measured(0.1)}
    _, best = planted(draws, 0, task(solved_at=None))
    assert best == 2 * MOST + 4


def fixed(*scores: float) -> Draw:
    return lambda _, n: np.resize(scores, n)


def test_each_look_has_its_share_of_the_rate() -> None:
    """The chance of the first three seeds is 0.005: below 0.05 / 4, above that of fixed seeds."""
    draws = {"a": fixed(0.40, 0.45, 0.50), "b": fixed(0.625, 0.675, 0.725)}
    assert planted(draws, 0, task(solved_at=None))[1] == 2 * 3


def test_seeds_that_agree_by_chance_do_not_decide() -> None:
    """Scores of 1024 problems differ by 0.016 from the problems that were drawn alone."""
    draws = {"a": fixed(0.5, 0.5, 0.501), "b": fixed(0.52, 0.52, 0.521)}
    assert planted(draws, 0, task(solved_at=None))[1] > 2 * 3


def test_losses_have_no_sampling_error_of_a_share() -> None:
    draws = {"a": fixed(0.5, 0.5, 0.501), "b": fixed(0.52, 0.52, 0.521)}
    loss = task(metric="bits_per_byte", higher_is_better=False, solved_at=None)
    assert planted(draws, 0, loss)[1] == 2 * 3


def test_the_best_is_told_apart_from_all_others() -> None:
    draws = {"a": fixed(0.9, 0.91, 0.92), "b": fixed(0.8, 0.8, 0.81), "c": fixed(0.1, 0.8, 0.8)}
    assert planted(draws, 0, task(solved_at=None))[1] == 2 * MOST + 4


def test_a_model_that_diverged_gets_no_more_seeds() -> None:
    draws = {"a": fixed(0.5, 0.6, 0.7), "b": fixed(0.6, float("nan"), 0.7)}
    assert planted(draws, 0, task(solved_at=None))[1] == 2 * 3


def test_models_of_different_sizes_need_not_be_told_apart() -> None:
    draws = dict.fromkeys("ab", normal(0.6, 0.02))
    assert planted(draws, 0, task(), sized=True)[1] == 2 * 3


def test_the_order_of_all_asks_for_more_than_the_best() -> None:
    draws = {"best": measured(0.9), "c": normal(0.3, 0.02), "d": normal(0.3, 0.02)}
    spent = {
        wanted: planted(draws, 1, task(solved_at=None), wanted)[1] for wanted in ("best", "order")
    }
    assert spent["best"] < spent["order"]


def test_without_a_decision_all_seeds_are_run() -> None:
    _, spent = planted({"a": measured(0.9), "b": measured(0.1)}, 0, task(), "no")
    assert spent == 2 * MOST


def runs(*tasks: str, models: str = "ab", most: int = MOST) -> list[Any]:
    return [
        SimpleNamespace(task=t, size=None, family="", label=m, training=SimpleNamespace(seed=s))
        for t in tasks
        for s in range(most)
        for m in models
    ]


HALF: Any = SimpleNamespace(by_length={8: {"accuracy": 0.5}})


@pytest.mark.parametrize(("minutes", "added"), [(0, False), (1, False), (2, True)])
def test_no_seed_is_added_after_the_time(
    minutes: float, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, *[90.0] * MOST])
    monkeypatch.setattr("stateline.compare.seeds.time.monotonic", times.__next__)
    jobs = runs("t")
    seeds = Seeds("best", jobs, {"t": task()}, minutes)
    assert any(seeds.after(job, HALF) for job in jobs[:6]) == added


def test_no_task_waits_for_another() -> None:
    jobs = runs("t", "u")
    seeds = Seeds("best", jobs, {"t": task(), "u": task()})
    assert [seeds.after(job, HALF) for job in jobs[:6]] == [False] * 5 + [True]
    assert [job.task for job in jobs if seeds.is_asked(job)] == ["t"] * 8 + ["u"] * 6


def test_after_the_last_seed_there_are_no_more() -> None:
    jobs = runs("t", most=4)
    seeds = Seeds("best", jobs, {"t": task()})
    assert [i for i, job in enumerate(jobs) if seeds.after(job, HALF)] == [5]


SCORES = {"attention": [0.9, 0.91, 0.92, 0.9, 0.9, 0.9], "lstm": [0.1, 0.5, 0.9, 0.1, 0.1, 0.1]}


def test_a_comparison_adds_seeds_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second model varies too much for three seeds; a comparison that goes on ends the same."""
    recall = "associative_recall(length=4, batch_size=4)"
    comparison = Comparison(
        [*SCORES], [recall], d_model=8, steps=1, lr=1e-3, decide="best", match="none"
    )
    trained: list[str] = []

    def run_job(start: Start, _: object) -> RunRecord:
        job, folder = start.job, start.folder
        if len(trained) == 7:
            raise KeyboardInterrupt
        trained.append(job.name)
        value = SCORES[job.label][job.training.seed]
        lengths = make_task(job.task).eval_lengths
        run = RunRecord(
            model=job.label,
            task=job.task,
            seed=job.training.seed,
            d_model=8,
            parameters=1,
            parameters_wanted=1,
            steps=1,
            stopped="finished",
            seconds=0.0,
            tokens_per_second=0.0,
            steps_to_solve=None,
            curve=[],
            by_length={length: {"accuracy": value} for length in lengths},
        )
        (folder / "result.json").write_text(to_json(run))
        return run

    monkeypatch.setattr("stateline.compare.pool.run_job", run_job)
    with pytest.raises(KeyboardInterrupt):
        compare(comparison, tmp_path, workers=0, timing="none")
    first = list(trained)
    trained.clear()
    trained += ["resumed"] * 8  # so that nothing is interrupted again
    results = compare(comparison, tmp_path, workers=0, timing="none")
    assert len(first) == 7
    assert not set(first) & set(trained)
    seeds = {m: [run.seed for run in results.runs if run.model == m] for m in SCORES}
    assert seeds["attention"] == seeds["lstm"] == list(range(len(seeds["lstm"])))
    assert 3 < len(seeds["lstm"]) <= 6
    assert results.protocol is not None
    assert results.protocol.looks == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_minutes": 1.0}, "budget_minutes limits the seeds that are added"),
        ({"budget_minutes": -1.0, "decide": "best"}, "budget_minutes must be at least 0"),
        ({"seeds": 2, "decide": "best"}, "decide begins with 3 seeds and adds more, got seeds=2"),
    ],
)
def test_a_decision_that_cannot_be_made_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(Comparison(["lstm"], ["copying"], **changes))
