"""The figures of a report: what each shows, in words, and the name of its files."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes

from stateline.errors import InputError
from stateline.models.pattern import Item, parse_pattern
from stateline.reports import plots
from stateline.reports.costs import DECODING, FLOPS, STATE, TRAINING, cost_lengths
from stateline.reports.format import slug, words
from stateline.reports.records import Record, measured, runs_of

ENDED = "A line per seed, with a marker where training stopped."
MEDIAN = "Median over seeds; the band is from lowest to highest. Equal lines are nested."
SOLVED = "Solid: seeds that solved the training length. Dashed: models that did not."


class Figure(NamedTuple):
    """A plot and what is said of it.

    Attributes:
        name: Unlike that of any other figure; also the name of its files, without their endings.
        title: What is plotted against what.
        note: How to read it.
        draw: Draws it on empty axes.
        models: Number and name of each model that it shows.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    models: list[tuple[int, str]]


def figures(results: Record) -> Iterator[Figure]:
    """All figures of a report, in its order."""
    for task in results["tasks"]:
        yield from task_figures(results, task)
    yield from keyword_figures(results)
    yield from cost_figures(results)


def task_figures(results: Record, task: Record) -> list[Figure]:
    """The figures on one task, without those that no run has numbers for."""
    metric = words(task["metric"]).capitalize()
    curve = partial(plots.learning_curve, results=results, task=task)
    drawn = [
        Figure(
            "by-length",
            f"{metric} by length",
            MEDIAN if task["solved_at"] is None else f"{MEDIAN} {SOLVED}",
            partial(plots.by_length, results=results, task=task),
            _models(results, lambda model: bool(runs_of(results, model, task))),
        ),
        Figure(
            "by-position",
            f"{metric} by position",
            f"{MEDIAN} Each point is the mean since the one before.",
            partial(plots.by_position, results=results, task=task),
            _models(results, lambda model: bool(plots.positions(results, model, task))),
        ),
        Figure(
            "by-bits",
            f"{metric} by bits of a number of the state",
            f"{MEDIAN} The state is rounded just before the last token of the prompt. Seeds that "
            "solved the training length.",
            partial(plots.by_bits, results=results, task=task),
            _models(results, lambda model: bool(measured(results, model, task))),
        ),
        Figure(
            "while-training",
            f"{metric} while training",
            ENDED,
            partial(curve, field="metric"),
            _models(results, lambda model: bool(plots.curves(results, model, task, "metric"))),
        ),
        Figure(
            "loss",
            "Loss while training",
            ENDED,
            partial(curve, field="loss"),
            _models(results, lambda model: bool(plots.curves(results, model, task, "loss"))),
        ),
    ]
    name = task_name(results, task)
    return [figure._replace(name=f"{name}-{figure.name}") for figure in drawn if figure.models]


def keyword_figures(results: Record) -> list[Figure]:
    """The score by a keyword, of three tasks or more that differ in its number alone."""
    drawn = []
    for (name, keyword), tasks in _families(results).items():
        specs = {task["spec"] for task in tasks.values()}
        trained = {run["model"] for run in results["runs"] if run["task"] in specs}
        metric = words(next(iter(tasks.values()))["metric"]).capitalize()
        drawn.append(
            Figure(
                f"{slug(name)}-by-{slug(keyword)}",
                f"{metric} by {keyword}: {name}",
                f"{MEDIAN} Each at the length that it was trained at, solved or not.",
                partial(plots.by_keyword, results=results, keyword=keyword, tasks=tasks),
                _models(results, trained.__contains__),
            )
        )
    return [figure for figure in drawn if figure.models]


def _families(results: Record) -> dict[tuple[str, str], dict[int | float, Record]]:
    """Tasks by the keyword in which alone they differ, and by its number."""
    families: dict[tuple[str, str], dict[int | float, Record]] = {}
    items = [(item, task) for task in results["tasks"] for item in _parsed(task["spec"])]
    for first, _ in items:
        for keyword in first.keywords:
            tasks: dict[int | float, Record] = {}
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
    """A task by its name and keywords; nothing where a record names it otherwise."""
    try:
        return list(parse_pattern(spec)[:1])
    except InputError:
        return []


def cost_figures(results: Record) -> list[Figure]:
    """The figures on what the models cost, as far as that was measured."""
    return [
        Figure(
            f"cost-{slug(cost.title)}",
            cost.title,
            cost.note,
            partial(plots.cost_by_length, results=results, cost=cost),
            _models(results, _measured(results, cost.field).__contains__),
        )
        for cost in (STATE, DECODING, TRAINING, FLOPS)
        if cost_lengths(results, cost)
    ]


def task_name(results: Record, task: Record) -> str:
    """A name for the task's section and files, unlike that of any other task.

    Example:
        >>> copying = {"name": "copying", "spec": "copying(max_len=20)"}
        >>> task_name({"tasks": [copying]}, copying)
        'copying'
        >>> task_name({"tasks": [copying, {"name": "copying", "spec": "copying"}]}, copying)
        'copying-1'
    """
    name = slug(task["name"])
    same = [t["spec"] for t in results["tasks"] if slug(t["name"]) == name]
    return name if len(same) == 1 else f"{name}-{same.index(task['spec']) + 1}"


def _models(results: Record, shown: Callable[[str], bool]) -> list[tuple[int, str]]:
    return [pair for pair in enumerate(results["models"]) if shown(pair[1])]


def _measured(results: Record, field: str) -> set[str]:
    return {entry["model"] for entry in results["speed"] if entry[field]}
