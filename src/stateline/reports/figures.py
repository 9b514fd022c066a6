"""The figures of a report: their titles, notes and file names."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes

from stateline.errors import InputError
from stateline.models.pattern import Item, parse_pattern
from stateline.reports import plots
from stateline.reports.costs import DECODING, FLOPS, STATE, TRAINING, Cost, cost_lengths
from stateline.reports.format import words
from stateline.reports.records import measured, runs_of
from stateline.runs.folder import slug
from stateline.runs.results import Results, TaskRecord

ENDED = "One line per seed; the marker is where training stopped."
MEDIAN = "Median over seeds, with a band from lowest to highest."
SOLVED = "Solid: seeds that solved the training length. Dashed: models that did not solve it."


class Figure(NamedTuple):
    """A plot with its texts.

    Attributes:
        name: Unique name; also that of its files, without suffix.
        title: What is plotted against what.
        note: How to read it.
        draw: Draws the plot on empty axes.
        models: Number and name of each model in the plot.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    models: list[tuple[int, str]]


def figures(results: Results) -> Iterator[Figure]:
    """All figures of a report, in order."""
    for task in results.tasks:
        yield from task_figures(results, task)
    yield from keyword_figures(results)
    yield from cost_figures(results)


def task_figures(results: Results, task: TaskRecord) -> list[Figure]:
    """The figures of one task, without those that no run has data for."""
    metric = words(task.metric).capitalize()
    curve = partial(plots.learning_curve, results=results, task=task)
    drawn = [
        Figure(
            "by-length",
            f"{metric} by length",
            MEDIAN if task.solved_at is None else f"{MEDIAN} {SOLVED}",
            partial(plots.by_length, results=results, task=task),
            _models(results, lambda model: bool(runs_of(results, model, task))),
        ),
        Figure(
            "by-position",
            f"{metric} by position",
            f"{MEDIAN} Each point is the mean since the previous point.",
            partial(plots.by_position, results=results, task=task),
            _models(results, lambda model: bool(plots.positions(results, model, task))),
        ),
        Figure(
            "by-bits",
            f"{metric} by bits per number of the state",
            f"{MEDIAN} The state is rounded just before the last token of the prompt. Only seeds "
            "that solved the training length.",
            partial(plots.by_bits, results=results, task=task),
            _models(results, lambda model: bool(measured(results, model, task))),
        ),
        Figure(
            "while-training",
            f"{metric} during training",
            ENDED,
            partial(curve, field="metric"),
            _models(results, lambda model: bool(plots.curves(results, model, task, "metric"))),
        ),
        Figure(
            "loss",
            "Loss during training",
            ENDED,
            partial(curve, field="loss"),
            _models(results, lambda model: bool(plots.curves(results, model, task, "loss"))),
        ),
    ]
    name = task_name(results, task)
    return [figure._replace(name=f"{name}-{figure.name}") for figure in drawn if figure.models]


def keyword_figures(results: Results) -> list[Figure]:
    """The score by a keyword, for three or more tasks that differ only in its number."""
    drawn = []
    for (name, keyword), tasks in _families(results).items():
        specs = {task.spec for task in tasks.values()}
        trained = {run.model for run in results.runs if run.task in specs}
        metric = words(next(iter(tasks.values())).metric).capitalize()
        drawn.append(
            Figure(
                f"{slug(name)}-by-{slug(keyword)}".lower(),
                f"{metric} by {keyword}: {name}",
                f"{MEDIAN} Each task at its training length, solved or not.",
                partial(plots.by_keyword, results=results, keyword=keyword, tasks=tasks),
                _models(results, trained.__contains__),
            )
        )
    return [figure for figure in drawn if figure.models]


def _families(results: Results) -> dict[tuple[str, str], dict[int | float, TaskRecord]]:
    """Tasks that differ only in the number of one keyword, by that number."""
    families: dict[tuple[str, str], dict[int | float, TaskRecord]] = {}
    items = [(item, task) for task in results.tasks for item in _parsed(task.spec)]
    for first, _ in items:
        for keyword in first.keywords:
            tasks: dict[int | float, TaskRecord] = {}
            for item, task in items:
                value = item.keywords.get(keyword)
                alike = item.name == first.name and item.keywords | {keyword: 0} == (
                    first.keywords | {keyword: 0}
                )
                if alike and isinstance(value, int | float) and not isinstance(value, bool):
                    tasks[value] = task
            if len(tasks) > 2:
                families.setdefault((first.name, keyword), tasks)
    return families


def _parsed(spec: str) -> list[Item]:
    """The name and keywords of a task; empty if its spec is no pattern, as after a merge."""
    try:
        return list(parse_pattern(spec)[:1])
    except InputError:
        return []


def cost_figures(results: Results) -> list[Figure]:
    """The figures on the costs that were measured."""
    return [
        Figure(
            f"cost-{slug(cost.title)}".lower(),
            cost.title,
            cost.note,
            partial(plots.cost_by_length, results=results, cost=cost),
            _models(results, _measured(results, cost).__contains__),
        )
        for cost in (STATE, DECODING, TRAINING, FLOPS)
        if cost_lengths(results, cost)
    ]


def task_name(results: Results, task: TaskRecord) -> str:
    """A unique name for the task's section and files: ``copying``, or ``copying-2``."""
    name = slug(task.name).lower()
    same = [t.spec for t in results.tasks if slug(t.name).lower() == name]
    return name if len(same) == 1 else f"{name}-{same.index(task.spec) + 1}"


def _models(results: Results, shown: Callable[[str], bool]) -> list[tuple[int, str]]:
    return [pair for pair in enumerate(results.models) if shown(pair[1])]


def _measured(results: Results, cost: Cost) -> set[str]:
    return {entry.model for entry in results.speed if cost.values(entry)}
