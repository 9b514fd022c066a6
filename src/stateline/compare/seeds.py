"""Adds seeds to the models that the scores so far do not tell apart.

Every model begins with :data:`~stateline.runs.verdict.FIRST_LOOK` seeds. When all seeds that were
asked for on a task are done, its models are judged as in the report. Models that must still be told
apart get one more seed each, up to the limit. The test allows for a look after every seed: its
error rate over all looks and pairs is :data:`~stateline.runs.verdict.ERROR_RATE`.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from stateline.runs.job import Job
from stateline.runs.judged import score, verdict_of
from stateline.runs.results import RunRecord, TaskRecord
from stateline.runs.verdict import FIRST_LOOK

Wanted = Literal["best", "order", "no"]
"""What is to be decided: the best model of each task, the order of all, or nothing."""


class _Group(NamedTuple):
    """The models of a task that have one size."""

    task: str
    size: int | None


class Seeds:
    """Decides from the scores of finished runs which seeds of a comparison are run.

    Args:
        wanted: What is to be decided; with ``no`` all seeds are run.
        jobs: The scored runs, all seeds of each model.
        tasks: The tasks by spec.
        minutes: Time after which no seeds are added; ``None`` is no limit.
    """

    def __init__(
        self,
        wanted: Wanted,
        jobs: Sequence[Job],
        tasks: Mapping[str, TaskRecord],
        minutes: float | None = None,
    ) -> None:
        self.wanted, self.tasks = wanted, tasks
        self.most = max(job.training.seed for job in jobs) + 1
        self.asked = {_model(job): min(FIRST_LOOK, self.most) for job in jobs}
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._scores: dict[tuple[_Group, str], dict[int, float]] = {}

    @property
    def looks(self) -> int:
        """Largest number of looks at the scores; 1 if the number of seeds is fixed."""
        return 1 if self.wanted == "no" else max(1, self.most - FIRST_LOOK + 1)

    def is_asked(self, job: Job) -> bool:
        """Whether a scored run is needed, by the scores so far."""
        return self.wanted == "no" or job.training.seed < self.asked[_model(job)]

    def after(self, job: Job, run: RunRecord) -> bool:
        """Record the score of a finished run; return whether it led to more seeds."""
        if self.wanted == "no":
            return False
        task = self.tasks[job.task]
        own = self._scores.setdefault(_model(job), {})
        own[job.training.seed] = score(run, task, task.train_length)
        group = _group(job)
        asked = {model: n for model, n in self.asked.items() if model[0] == group}
        waiting = any(len(self._scores.get(model, ())) < n for model, n in asked.items())
        if waiting or time.monotonic() > self.end:
            return False
        open_ = set(self._undecided(group, task))
        fewest = min((asked[group, label] for label in open_), default=self.most)
        more = {(group, label) for label in open_ if asked[group, label] == fewest < self.most}
        self.asked |= dict.fromkeys(more, fewest + 1)
        return bool(more)

    def _undecided(self, group: _Group, task: TaskRecord) -> Iterator[str]:
        """The models that are not yet told apart from others, although ``wanted`` asks for it."""
        scores = {
            label: [own[seed] for seed in sorted(own)]
            for (of, label), own in self._scores.items()
            if of == group
        }
        found = verdict_of(task, scores, looks=self.looks)
        best = found.order[:1]
        for pair in found.pairs:
            if not pair.told and (self.wanted == "order" or {*best} & {pair.better, pair.worse}):
                yield from (pair.better, pair.worse)


def _group(job: Job) -> _Group:
    return _Group(job.task, job.size if job.family else None)


def _model(job: Job) -> tuple[_Group, str]:
    return _group(job), job.label
