"""The figures of a report: what each shows, in words, and the name of its files."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes

from stateline.reports import plots
from stateline.reports.costs import DECODING, FLOPS, STATE, TRAINING, cost_lengths
from stateline.reports.format import slug, words
from stateline.reports.records import Record, runs_of

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
