"""Trials choose the settings of each model; the worse trials stop early.

All trials of a model train for a share of their steps (:data:`RUNG`); the better half of them
continues to the end. The best of these trials on validation data gives the settings of the
scored runs. Trials and scored runs share no seed, and no data that is scored.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from stateline.compare.comparison import Comparison
from stateline.compare.seeds import Seeds
from stateline.errors import InputError
from stateline.pattern import MAX_REPEAT
from stateline.runs.folder import stored_run
from stateline.runs.job import Job
from stateline.runs.protocol_records import ProtocolRecord, TrialRecord
from stateline.runs.results import RunRecord
from stateline.runs.store import describe_task
from stateline.tasks import Task, make_task
from stateline.train.config import TrainConfig
from stateline.train.metrics import COMPLETE

FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates that are tried, relative to the model's own on the task."""

SETTINGS = ("lr", "muon_lr", "weight_decay")
"""What trials choose."""

RUNG, KEPT = 0.25, 0.5
"""Share of the steps after which trials are ranked, and share of the trials that continue."""

TRIAL_SEED = MAX_REPEAT + 1
"""Seed of all trials; the scored runs have smaller ones."""


class Sweep:
    """Which jobs a comparison needs: first its trials, then the runs that are scored.

    Args:
        comparison: What is compared.
        jobs: Its scored runs, from :func:`~stateline.compare.comparison.plan`.
        tasks: Its tasks by spec.

    Attributes:
        jobs: The scored runs; their settings are the plan's until others are chosen.
            No job runs before its settings are chosen, so no run with the settings of the plan is
            mistaken for a run with chosen ones.
    """

    def __init__(
        self, comparison: Comparison, jobs: Sequence[Job], tasks: Mapping[str, Task]
    ) -> None:
        self.comparison, self.tasks, self.jobs = comparison, tasks, list(jobs)
        self._models = [_model(job) for job in jobs]
        records = {spec: describe_task(spec, task) for spec, task in tasks.items()}
        self._seeds = Seeds(comparison.decide, jobs, records, comparison.budget_minutes)
        self._named = set[Job]()
        self._trials = {model: self._grid(model) for model in dict.fromkeys(self._models)}
        self._done: dict[Job, RunRecord] = {}
        self._continued = set[Job]()
        self._chosen: dict[Job, Job] = {}

    def first(self) -> list[Job]:
        """The jobs to begin with."""
        found = []
        for model, trials in self._trials.items():
            found += trials if len(trials) > 1 else self._choose(model, trials[0])
        return found

    def after(self, job: Job, run: RunRecord) -> list[Job]:
        """The jobs that can be run now that another one is done."""
        if not job.trial:
            same = [own for own in self.jobs if own == job]  # also under another name
            more = [self._seeds.after(own, run) for own in same]
            return self._needed() if any(more) else []
        self._done[job] = run
        model = next(model for model, trials in self._trials.items() if job in trials)
        trials = self._trials[model]
        if not all(trial in self._done for trial in trials):
            return []
        ranked = sorted(trials, key=lambda trial: self._rank(trial, trials[0].until), reverse=True)
        best = ranked[: math.ceil(KEPT * len(trials))]
        if waiting := [t for t in best if self._done[t].stopped == "paused"]:
            fresh = [trial for trial in waiting if trial not in self._continued]
            self._continued.update(fresh)
            return [replace(trial, until=None) for trial in fresh]
        return self._choose(model, max(best, key=lambda trial: self._rank(trial, None)))

    def count(self) -> int:
        """How many jobs there will be at most."""
        trials = [len(trials) for trials in self._trials.values() if len(trials) > 1]
        return len(set(self.jobs)) + sum(n + math.ceil(KEPT * n) for n in trials)

    def later(self) -> int:
        """How many jobs will follow the jobs named so far."""
        open_ = [trials for model, trials in self._trials.items() if model not in self._chosen]
        waiting = [trials for trials in open_ if not self._continued & set(trials)]
        scored = set(self.jobs) - self._named
        return len(scored) + sum(math.ceil(KEPT * len(trials)) for trials in waiting)

    def trials(self, job: Job) -> tuple[int, int]:
        """How many trials choose the settings of a scored run, and their updates at most."""
        trials = self._trials[_model(job)]
        if len(trials) == 1:
            return 0, 0
        until, kept = trials[0].until or job.training.steps, math.ceil(KEPT * len(trials))
        return len(trials), len(trials) * until + kept * (job.training.steps - until)

    def is_done(self, job: Job, run: RunRecord) -> bool:
        """Whether a stored result completes a job."""
        far_enough = job.until is not None and run.steps >= job.until
        return run.stopped != "paused" or far_enough

    def protocol(self) -> ProtocolRecord:
        """How the settings are chosen, for the results."""
        comparison, specs = self.comparison, list(dict.fromkeys(job.task for job in self.jobs))
        tried = [trial for trials in self._trials.values() for trial in trials]
        swept = any(len(trials) > 1 for trials in self._trials.values())

        def values(jobs: Sequence[Job], name: str) -> dict[str, list[Any]]:
            found = {s: {getattr(j.training, name) for j in jobs if j.task == s} for s in specs}
            return {spec: sorted(own - {None}) for spec, own in found.items()}

        return ProtocolRecord(
            name=comparison.protocol,
            learning_rates=values(tried, "lr"),
            muon_rates=values(tried, "muon_lr"),
            weight_decays=values(tried, "weight_decay"),
            seeds=values(self.jobs, "seed"),
            trial_seed=TRIAL_SEED if swept else None,
            rungs=[RUNG] if swept else [],
            kept=KEPT if swept else 1.0,
            validation={
                spec: make_task(spec, seed=TRIAL_SEED).hold_out_validation()
                for spec in specs
                if swept
            },
            matched_by=comparison.match,
            match_length=comparison.match_length,
            sizes=list(comparison.sizes),
            looks=self._seeds.looks,
        )

    def records(self) -> list[TrialRecord]:
        """All trials that have ended or paused, in the order of the models."""
        pairs = zip(self.jobs, self._models, strict=True)
        named = {(job.label, model): job for job, model in pairs}
        return [
            self._record(trial, job, chosen=self._chosen.get(model) == trial)
            for (_, model), job in named.items()
            for trial in self._trials[model]
            if trial in self._done
        ]

    def _grid(self, model: Job) -> list[Job]:
        """The trials of a model; a single one is not run."""
        comparison, own = self.comparison, model.training
        rates = comparison.lrs or [own.lr]
        if not comparison.lrs and comparison.lr is None and comparison.protocol == "sweep":
            rates = _around(own.lr)
        rung = max(1, round(RUNG * own.steps))
        every = min(own.eval_every or own.steps, rung)
        fixed = replace(own, seed=TRIAL_SEED, eval_every=every, keep=1)
        until, decays = rung // every * every, comparison.weight_decays or [own.weight_decay]
        grid = dict.fromkeys(product(rates, self._muon_rates(own), decays))
        settings = [
            replace(fixed, lr=rate, muon_lr=matrix_rate, weight_decay=decay)
            for rate, matrix_rate, decay in grid
        ]
        return [replace(model, trial=True, until=until, training=own) for own in settings]

    def _muon_rates(self, own: TrainConfig) -> Sequence[float | None]:
        """Learning rates to try for the matrices that Muon updates, each with every ``lr``."""
        comparison = self.comparison
        if own.optimizer != "muon" and comparison.muon_lrs:
            raise InputError(
                f"muon_lrs needs the optimizer muon, got {own.optimizer}: set --train.optimizer "
                "muon, or leave out muon_lrs"
            )
        if own.optimizer != "muon":
            return [None]
        if comparison.muon_lrs:
            return comparison.muon_lrs
        if own.muon_lr is not None or comparison.protocol == "quick" or comparison.lr is not None:
            return [own.muon_lr]
        return _around(own.lr)

    def _choose(self, model: Job, trial: Job) -> list[Job]:
        """Give the settings of a trial to its model's scored runs; return the runs to start."""
        self._chosen[model] = trial
        chosen = {name: getattr(trial.training, name) for name in SETTINGS}
        for place, own in enumerate(self._models):
            if own == model:
                job = self.jobs[place]
                self.jobs[place] = replace(job, training=replace(job.training, **chosen))
        return self._needed()

    def _needed(self) -> list[Job]:
        """The scored runs that are needed and can be run, each named once."""
        found = [
            job
            for job, model in zip(self.jobs, self._models, strict=True)
            if model in self._chosen and self._seeds.is_asked(job) and job not in self._named
        ]
        self._named.update(found)
        return list(dict.fromkeys(found))

    def _rank(self, trial: Job, until: int | None) -> tuple[float, ...]:
        """How good a trial was after a number of updates, or at its end: larger is better.

        First the score, but at most ``stop_at``; then fewer steps; then the training loss.
        """
        run, task = self._done[trial], self.tasks[trial.task]
        seen = [p for p in run.curve if until is None or p.step <= until]
        last = seen[-1].metric if seen and _ended_well(run) else None  # none if it is not finite
        if last is None:
            return (-math.inf,)
        side = 1.0 if task.higher_is_better else -1.0
        score, goal = side * last, trial.training.stop_at
        score = score if goal is None else min(score, side * goal)
        loss = seen[-1].loss
        return score, -seen[-1].step, -math.inf if loss is None else -loss

    def _record(self, trial: Job, job: Job, *, chosen: bool) -> TrialRecord:
        run, settings = self._done[trial], trial.training
        return TrialRecord(
            **{name: getattr(settings, name) for name in SETTINGS},
            model=job.label,
            task=trial.task,
            size=job.size,
            seed=settings.seed,
            steps=run.steps,
            steps_planned=settings.steps,
            validation=run.validation if _ended_well(run) else None,
            stopped=run.stopped,
            chosen=chosen,
            seconds=run.seconds,
            compile_seconds=run.compile_seconds,
        )


def _model(job: Job) -> Job:
    """The job with seed 0, which stands for all scored runs of a model on a task."""
    return replace(job, training=replace(job.training, seed=0))


def _around(rate: float) -> list[float]:
    """Learning rates around one."""
    return [float(f"{factor * rate:.3g}") for factor in FACTORS]


def _ended_well(run: RunRecord) -> bool:
    return run.stopped in (*COMPLETE, "paused")


def missing(
    sweep: Sweep, jobs: Sequence[Job], folder: Path, done: dict[Job, RunRecord]
) -> list[Job]:
    """The jobs without a result, among these jobs and all that follow from their results.

    Args:
        sweep: What the jobs belong to.
        jobs: The jobs to begin with.
        folder: Folder of the comparison.
        done: Gets the jobs with their results.
    """
    waiting, todo = deque(jobs), list[Job]()
    while waiting:
        job = waiting.popleft()
        run = stored_run(folder / "runs" / job.name)
        if run is not None and sweep.is_done(job, run):
            done[job] = run
            waiting.extend(sweep.after(job, run))
        else:
            todo.append(job)
    return todo
