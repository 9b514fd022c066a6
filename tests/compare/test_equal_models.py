"""Equal models under two names are not told apart, and different ones are."""

from itertools import combinations
from pathlib import Path

import pytest

from stateline.compare import Comparison, compare
from stateline.runs.verdict import ScoreKind, judge

RECALL = "associative_recall(length=8, batch_size=16)"


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_planted_pair_is_never_told_apart_in_20_trials(tmp_path: Path) -> None:
    """Six seeds of one layer, split in two halves in all ways, are compared as two models."""
    comparison = Comparison(
        ["first=attention*2", "second=attention*2", "recurrent=lstm"],
        [RECALL],
        d_model=32,
        steps=150,
        seeds=6,
        lrs=[3e-3],
    )
    results = compare(comparison, tmp_path, workers=0, timing="none")
    (task,) = results.tasks
    scores = {
        model: [
            run.by_length[task.train_length][task.metric]
            for run in results.runs
            if run.model == model
        ]
        for model in results.models
    }
    same = judge(scores, ScoreKind(True, task.problems))
    assert not {("first", "second"), ("second", "first")} & same.better
    assert scores["first"] == scores["second"]
    trials = list(combinations(range(6), 3))
    assert len(trials) == 20
    for half in trials:
        halves = {
            "first": [scores["first"][seed] for seed in half],
            "second": [scores["first"][seed] for seed in set(range(6)) - set(half)],
        }
        assert not judge(halves, ScoreKind(True, task.problems)).better
