"""The verdict on the scores of a task: seeds are added by it, and the answers hold it."""

import math
from collections.abc import Mapping, Sequence

from stateline.runs.results import RunRecord, TaskRecord
from stateline.runs.verdict import ScoreKind, Verdict, judge


def kind_of(task: TaskRecord) -> ScoreKind:
    """The kind of a task's scores; a seed solves a length with the score that solves the task."""
    return ScoreKind(task.higher_is_better, task.problems, task.solved_at)


def score(run: RunRecord, task: TaskRecord, length: int) -> float:
    """The task's metric of one run at one length; NaN where training diverged."""
    value = run.by_length[length][task.metric]
    return math.nan if value is None else value


def verdict_of(
    task: TaskRecord, scores: Mapping[str, Sequence[float]], *, looks: int = 1
) -> Verdict:
    """Judge models by their scores, see :func:`~stateline.runs.verdict.judge`."""
    return judge(scores, kind_of(task), looks=looks)
