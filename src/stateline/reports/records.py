"""What the results of runs say: their tasks, their runs, and which of these are scored.

A model that misses ``solved_at`` at the length it trained on has learned nothing that could
generalise, so it is not scored at any other length.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "stateline-results-1"

Record = Mapping[str, Any]
"""The results that ``stateline compare`` writes, or one task, run or speed entry of them."""


def sources(results: Record) -> list[Record]:
    """What was run: each with its folder, command, creation, environment, and whether it finished.

    Results that were not merged are their own source, of a folder without a name.
    """
    return results.get("sources") or [{"folder": "", **results}]


def task_label(results: Record, task: Record) -> str:
    """The task's title, or its whole spec where two tasks share the title."""
    titles = [other["title"] for other in results["tasks"]]
    return str(task["title"] if titles.count(task["title"]) == 1 else task["spec"])


def runs_of(results: Record, model: str, task: Record) -> list[Record]:
    """The runs of one model on one task, one per seed."""
    return [r for r in results["runs"] if r["model"] == model and r["task"] == task["spec"]]


def measured(results: Record, model: str, task: Record) -> list[Record]:
    """How the scores of a model's seeds depend on the bits of their state, where that is known."""
    return [run["capacity"] for run in runs_of(results, model, task) if "capacity" in run]


def score(run: Record, task: Record, length: int) -> float:
    """The task's metric of one run at one length; not a number where training diverged."""
    value = run["by_length"][str(length)][task["metric"]]
    return math.nan if value is None else float(value)


def solved_runs(runs: Sequence[Record], task: Record) -> list[Record]:
    """The runs that may be scored beyond the training length.

    These are the ones that reached ``solved_at`` at it (every run where nothing is ever solved),
    and none at all if the majority of the seeds did not.
    """
    if task["solved_at"] is None:
        return list(runs)
    solved = [run for run in runs if _reached_goal(run, task)]
    return solved if 2 * len(solved) >= len(runs) else []


def _reached_goal(run: Record, task: Record) -> bool:
    value, goal = score(run, task, task["train_length"]), task["solved_at"]
    return bool(value >= goal if task["higher_is_better"] else value <= goal)
