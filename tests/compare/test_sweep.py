"""The protocol: which settings go on, what chooses them, what is run again."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stateline.compare import Comparison, Job, News, compare, plan
from stateline.compare.comparison import make_tasks
from stateline.compare.sweep import TRIAL_SEED, Sweep
from stateline.errors import InputError
from stateline.files import finite
from stateline.reports import read_results
from stateline.runs.results import CurvePoint, RunRecord
from tests.whole_runs import run_whole

RECALL = "associative_recall(length=4, batch_size=4)"
TEXT = "text(path=text, length=8, batch_size=2)"


def sweep(*models: str, task: str = RECALL, **changes: Any) -> Sweep:
    settings = {"d_model": 8, "steps": 8, "seeds": 2, "lrs": [1.0, 2.0, 3.0, 4.0], **changes}
    comparison = Comparison(models or ("attention",), [task], **settings)
    tasks = make_tasks(comparison)
    return Sweep(comparison, plan(comparison, tasks), tasks)


def ended(job: Job, *scores: float | None, loss: float = 1.0, stopped: str = "") -> RunRecord:
    """The result of a trial with these scores so far; ``None`` where it diverged."""
    steps, score = job.training.steps if job.until is None else job.until, scores[-1]
    points = zip((2, job.training.steps), scores, strict=False)
    curve = [CurvePoint(step=step, loss=loss, metric=finite(own)) for step, own in points]
    curve = [] if score is None else curve
    how = stopped or ("finished" if job.until is None else "paused")
    return RunRecord(
        **{"model": job.label, "task": job.task, "seed": job.training.seed, "d_model": 8},
        **{"parameters": 1, "parameters_wanted": 1, "seconds": 0.0, "tokens_per_second": 0.0},
        **{"steps": steps, "steps_to_solve": None, "by_length": {}, "curve": curve},
        stopped="the loss became nan" if score is None else how,
        validation=finite(score),
    )


def play(
    of: Sweep, scores: Mapping[float, Sequence[float | None]], losses: Mapping[float, float] = {}
) -> list[tuple[float, int | None, int]]:
    """Run all jobs: (rate, pause, seed) in the order of their end.

    Args:
        of: What decides.
        scores: Scores of the trials by rate: at the pause, at the end.
        losses: Their training losses.
    """
    waiting, ran = of.first(), []
    while waiting:
        job = waiting.pop(0)
        rate = job.training.lr
        ran.append((rate, job.until, job.training.seed))
        if job.trial:
            so_far = scores[rate][: 2 if job.until is None else 1]
            waiting += of.after(job, ended(job, *so_far, loss=losses.get(rate, 1.0)))
        else:
            waiting += of.after(job, ended(job, 0.5))
    return ran


SCORES = {1.0: (0.1, 0.9), 2.0: (0.5, 0.6), 3.0: (0.6, 0.7), 4.0: (0.2, 0.9)}
FIRST = [(rate, 2, TRIAL_SEED) for rate in SCORES]


class TestChoice:
    def test_the_better_half_goes_on_and_the_best_at_the_end_is_scored(self) -> None:
        of = sweep()
        assert play(of, SCORES) == [
            *FIRST,
            *[(3.0, None, TRIAL_SEED), (2.0, None, TRIAL_SEED), (3.0, None, 0), (3.0, None, 1)],
        ]
        assert {job.training.lr for job in of.jobs} == {3.0}
        chosen = [(t.lr, t.stopped, t.validation) for t in of.records() if t.chosen]
        assert chosen == [(3.0, "finished", 0.7)]
        assert [t.stopped for t in of.records()] == ["paused", "finished", "finished", "paused"]

    def test_lower_is_better_where_the_task_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("text").write_text("the quick brown fox " * 30)
        ran = play(sweep(task=TEXT), SCORES)
        assert ran[4:] == [
            *[(1.0, None, TRIAL_SEED), (4.0, None, TRIAL_SEED), (1.0, None, 0), (1.0, None, 1)]
        ]

    def test_a_trial_that_diverges_makes_room_for_the_next_best(self) -> None:
        ran = play(sweep(), SCORES | {3.0: (0.6, None)})
        assert ran[4:] == [
            *[(3.0, None, TRIAL_SEED), (2.0, None, TRIAL_SEED), (4.0, None, TRIAL_SEED)],
            *[(4.0, None, 0), (4.0, None, 1)],
        ]

    def test_a_trial_whose_last_score_is_not_finite_is_not_chosen_for_an_earlier_one(self) -> None:
        ran = play(sweep(), SCORES | {3.0: (0.9, math.nan)})
        assert ran[4:] == [
            *[(3.0, None, TRIAL_SEED), (2.0, None, TRIAL_SEED), (2.0, None, 0), (2.0, None, 1)]
        ]

    def test_equal_scores_are_decided_by_the_training_loss(self) -> None:
        losses = {1.0: 2.0, 2.0: 1.5, 3.0: 1.0, 4.0: 1.2}
        ran = play(sweep(), dict.fromkeys(SCORES, (0.0, 0.0)), losses)
        assert [rate for rate, _, _ in ran[4:]] == [3.0, 4.0, 3.0, 3.0]

    def test_all_may_diverge(self) -> None:
        of = sweep()
        ran = play(of, dict.fromkeys(SCORES, (None, None)))
        assert ran == [*FIRST, (1.0, None, 0), (1.0, None, 1)]
        assert {trial.validation for trial in of.records()} == {None}

    def test_a_trial_that_solved_the_task_does_not_go_on(self) -> None:
        of = sweep()
        jobs = of.first()
        for job in jobs[:3]:
            assert of.after(job, ended(job, SCORES[job.training.lr][0])) == []
        more = of.after(jobs[3], ended(jobs[3], 1.0, stopped="solved"))
        assert [(job.training.lr, job.until) for job in more] == [(3.0, None)]
        more = of.after(more[0], ended(more[0], 0.6, 0.99))
        assert [(job.training.lr, job.training.seed) for job in more] == [(4.0, 0), (4.0, 1)]

    def test_the_jobs_to_come_are_counted(self) -> None:
        of = sweep("attention", "h3")
        first = of.first()
        assert (len(first), of.later(), of.count()) == (8, 2 * (2 + 2), 2 * (4 + 2 + 2))

    def test_trials_tell_their_size(self) -> None:
        of = sweep(d_model=None, parameters=[2000, 4000])
        play(of, SCORES)
        assert [trial.size for trial in of.records()] == [2000] * 4 + [4000] * 4

    def test_every_model_has_its_own_choice(self) -> None:
        of = sweep("attention", "h3")
        play(of, SCORES)
        assert len(of.records()) == 8
        assert [sum(t.chosen for t in of.records() if t.model == m) for m in ("attention", "h3")]

    def test_equal_models_share_their_runs_and_keep_their_names(self) -> None:
        of = sweep("a=h3", "b=h3")
        assert len(play(of, SCORES)) == 4 + 2 + 2
        assert [job.label for job in of.jobs] == ["a", "a", "b", "b"]
        assert [t.model for t in of.records() if t.chosen] == ["a", "b"]


class TestGrid:
    def test_by_default_three_rates_around_the_tasks_own_and_three_seeds(self) -> None:
        of = sweep(lrs=(), seeds=None)
        own = make_tasks(of.comparison)[RECALL].training["lr"]
        rates = [job.training.lr for job in of.first()]
        assert rates == pytest.approx([float(own) / 3, float(own), 3 * float(own)], rel=1e-2)
        assert [job.training.seed for job in of.jobs] == [0, 1, 2]

    def test_weight_decays_multiply_the_rates(self) -> None:
        tried = [
            (j.training.lr, j.training.weight_decay)
            for j in sweep(lrs=[1.0, 2.0], weight_decays=[0.0, 0.1]).first()
        ]
        assert tried == [(1.0, 0.0), (1.0, 0.1), (2.0, 0.0), (2.0, 0.1)]

    def test_the_protocol_tells_what_is_tried(self) -> None:
        told = sweep(lrs=[2.0, 1.0], weight_decays=[0.0, 0.1]).protocol()
        assert told.learning_rates == {RECALL: [1.0, 2.0]}
        assert told.weight_decays == {RECALL: [0.0, 0.1]}
        assert told.seeds == {RECALL: [0, 1]}
        assert (told.trial_seed, told.rungs, told.kept, told.looks) == (TRIAL_SEED, [0.25], 0.5, 1)

    def test_both_rates_of_muon_are_tried(self) -> None:
        def tried(**changes: Any) -> list[tuple[float, float | None]]:
            of = sweep(**{"lrs": [1.0, 2.0], "train": {"optimizer": "muon"}} | changes)
            return [(job.training.lr, job.training.muon_lr) for job in of.first()]

        given = tried(muon_lrs=[0.1, 0.2])
        assert given == [(1.0, 0.1), (1.0, 0.2), (2.0, 0.1), (2.0, 0.2)]
        assert len(tried(lrs=())) == 9
        fixed = {"train": {"optimizer": "muon", "muon_lr": 0.3}}
        assert tried(**fixed) == [(1.0, 0.3), (2.0, 0.3)]
        assert tried(train={}) == [(1.0, None), (2.0, None)]
        with pytest.raises(InputError, match="muon_lrs needs the optimizer muon, got adamw"):
            tried(train={}, muon_lrs=[0.1])

    def test_the_chosen_rates_of_muon_are_scored(self) -> None:
        of = sweep(lrs=[1.0], muon_lrs=[0.1, 0.2], train={"optimizer": "muon"})
        waiting = of.first()
        while waiting:
            job = waiting.pop(0)
            waiting += of.after(job, ended(job, job.training.muon_lr or 0.0, 0.9))
        assert {job.training.muon_lr for job in of.jobs} == {0.2}
        assert [t.muon_lr for t in of.records() if t.chosen] == [0.2]
        assert of.protocol().muon_rates == {RECALL: [0.1, 0.2]}

    @pytest.mark.parametrize("changes", [{"lr": 0.5, "lrs": ()}, {"lrs": [0.5]}])
    def test_a_single_setting_needs_no_trial(self, changes: dict[str, Any]) -> None:
        of = sweep(**changes)
        assert [(job.trial, job.training.lr) for job in of.first()] == [(False, 0.5)] * 2
        assert (of.protocol().trial_seed, of.protocol().rungs) == (None, [])

    def test_quick_is_one_run_at_the_tasks_own_settings(self) -> None:
        of = sweep(protocol="quick", lrs=(), seeds=None)
        assert of.first() == of.jobs == plan(of.comparison)
        assert len(of.jobs) == 1
        assert of.protocol().name == "quick"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"protocol": "quick"}, "the protocol quick tries nothing"),
            ({"protocol": "quick", "lrs": [], "muon_lrs": [1.0, 2.0]}, "quick tries nothing"),
            ({"lr": 1.0}, "give one of the two"),
            ({"lrs": (), "lr": 1.0, "train": {"lr": 2.0}}, "lr and train.lr were both given"),
            ({"steps": 3, "train": {"steps": 5}}, "steps and train.steps were both given"),
            ({"seeds": 0}, "seeds must be from 1 to 9999, got 0"),
            ({"seeds": 10_000}, "seeds must be from 1 to 9999, got 10000"),
            ({"train": {"seed": 3}}, "seed is set by the protocol: give the number of seeds"),
            ({"model": {"d_model": 4}}, "would set the width of all models: give d_model"),
            ({"model": {"nrom": "rms"}}, "nrom"),
            ({"train": {"stpes": 3}}, "unknown training setting 'stpes': did you mean 'steps'"),
            ({"lrs": [-1.0, 1.0]}, "wants lr to be a finite number above 0, got -1.0"),
        ],
    )
    def test_mistakes_are_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            sweep(**changes)


class StopAfter(News):
    """Ctrl-C is pressed when a number of jobs is done."""

    def __init__(self, jobs: int) -> None:
        self.left = jobs

    def finished(self, job: Job, run: RunRecord) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class AllDone(News):
    def planned(self, jobs: int, done: int) -> None:
        assert jobs == done == 6

    def finished(self, job: Job, run: RunRecord) -> None:
        raise AssertionError("done again")


@pytest.mark.usefixtures("one_process")
class TestRuns:
    comparison = Comparison(["h3"], [RECALL], d_model=4, steps=4, seeds=1)

    def test_an_interrupted_sweep_goes_on_and_ends_as_an_uninterrupted_one(
        self, tmp_path: Path
    ) -> None:
        whole = compare(self.comparison, tmp_path / "whole", workers=0, timing="none")
        assert (len(whole.trials), len(whole.runs)) == (3, 1)
        assert {trial.seed for trial in whole.trials} == {TRIAL_SEED}
        assert not {TRIAL_SEED} & {run.seed for run in whole.runs}
        ended = 0
        for jobs in (2, 2, 1):
            folder, news = tmp_path / "parts", StopAfter(jobs)
            with pytest.raises(KeyboardInterrupt):
                compare(self.comparison, folder, workers=0, timing="none", news=news)
            kept = read_results(folder)
            assert sum(t.steps for t in kept.trials) >= ended
            ended = sum(t.steps for t in kept.trials)
        parts = compare(self.comparison, folder, workers=0, timing="none")
        compare(self.comparison, folder, workers=0, timing="none", news=AllDone())
        times = {"seconds": 0.0, "compile_seconds": 0.0}
        assert [replace(t, **times) for t in parts.trials] == [
            replace(t, **times) for t in whole.trials
        ]
        times["tokens_per_second"] = 0.0
        assert [replace(r, **times) for r in parts.runs] == [
            replace(r, **times) for r in whole.runs
        ]

    def test_a_paused_trial_goes_on_from_its_checkpoint_to_the_bit(self, tmp_path: Path) -> None:
        job = sweep("h3", lrs=(), d_model=4).first()[0]
        paused = run_whole(job, tmp_path / "a")
        assert (paused.stopped, paused.steps, paused.by_length) == ("paused", 2, {})
        on = Job(**{**vars(job), "until": None})
        parts = run_whole(on, tmp_path / "a")
        whole = run_whole(on, tmp_path / "b")
        assert parts.curve == whole.curve
        assert parts.validation == whole.curve[-1].metric
        weights = [
            f / "checkpoints" / "step-00000008" / "model.safetensors"
            for f in (tmp_path / "a", tmp_path / "b")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes()

    def test_a_model_whose_output_becomes_nan_has_diverged_and_the_others_go_on(
        self, tmp_path: Path
    ) -> None:
        task = "copying(max_len=3, batch_size=2)"
        comparison = Comparison(["h3"], [task], d_model=8, steps=2, seeds=1, lrs=[1e-3, 1e30])
        results = compare(comparison, tmp_path, workers=0, timing="none")
        assert [(t.chosen, t.validation is None) for t in results.trials] == [
            (True, False),
            (False, True),
        ]
        assert "NaN" in results.trials[1].stopped or "nan" in results.trials[1].stopped
        assert results.runs[0].stopped == "finished"

    def test_a_model_that_cannot_write_a_sample_has_none_and_the_others_go_on(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "a.txt").write_text("the state is a value, " * 60)
        task = f"text(path={tmp_path / 'a.txt'}, length=16, batch_size=2, lr=1e30)"
        comparison = Comparison(["h3", "lstm"], [task], d_model=8, steps=1, protocol="quick")
        results = compare(comparison, tmp_path / "out", workers=0, timing="none")
        assert [(run.stopped, run.sample) for run in results.runs] == [("finished", None)] * 2
