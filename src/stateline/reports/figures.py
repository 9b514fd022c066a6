"""The charts of a report, in its order."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from stateline.charts.chart import Axis, Chart
from stateline.charts.lines import Level, Line, Point, length_ticks, line_chart
from stateline.charts.style import ModelStyle
from stateline.errors import InputError
from stateline.pattern import Item, parse_pattern
from stateline.reports import series
from stateline.reports.axes import cost_axis, score_axis
from stateline.reports.costs import Cost, Interval, cost_lengths, costs
from stateline.reports.format import words
from stateline.reports.records import drawn_models, runs_of, task_label
from stateline.reports.scaling import scaling_charts
from stateline.reports.trade_offs import trade_off_charts
from stateline.runs.folder import slug
from stateline.runs.judged import score
from stateline.runs.results import Results, TaskRecord

Series = Callable[[Results, str, TaskRecord], list[Point]]


class Sections(NamedTuple):
    """The charts of a report by its sections; the first has scores by length and by cost."""

    lengths: list[Chart]
    trade_offs: list[Chart]
    tasks: dict[str, list[Chart]]
    keywords: list[Chart]
    costs: list[Chart]

    def charts(self) -> list[Chart]:
        """All charts, in the order of the report."""
        tasks = [chart for charts in self.tasks.values() for chart in charts]
        return [*self.lengths, *self.trade_offs, *tasks, *self.keywords, *self.costs]

    def by_state(self) -> list[Chart]:
        """The scores of all tasks against the size of the state."""
        names = {f"{name}-against-state-size" for name in self.tasks}
        return [chart for chart in self.trade_offs if chart.name in names]

    def slides(self) -> dict[str, list[Chart]]:
        """The scores of each task by length and by state, by the name of a picture of both."""
        first = {chart.name: chart for chart in [*self.lengths, *self.by_state()]}
        pairs = {
            name: [first.get(f"{name}-by-length"), first.get(f"{name}-against-state-size")]
            for name in self.tasks
        }
        whole = {name: [own for own in pair if own is not None] for name, pair in pairs.items()}
        return {f"{name}-slide": pair for name, pair in whole.items() if len(pair) == 2}


def sections(results: Results) -> Sections:
    """The charts of a report; those without data are left out."""
    names = {task_name(results, task): task for task in results.tasks}
    charts = {name: task_charts(results, task) for name, task in names.items()}
    lengths = [c for name, own in charts.items() for c in own if c.name == f"{name}-by-length"]
    return Sections(
        lengths,
        [chart for name, task in names.items() for chart in trade_off_charts(results, task, name)],
        {name: [c for c in own if c not in lengths] for name, own in charts.items()},
        keyword_charts(results),
        [_cost_chart(results, c) for c in costs(results) if _is_shown(results, c)],
    )


def task_charts(results: Results, task: TaskRecord) -> list[Chart]:
    """The charts of one task for which a run has data."""
    metric, levels = words(task.metric), _levels(task)
    here = Level("trained", x=task.train_length)
    steps = Axis("training step", form=",.4~r")
    since = "Each point: the score since the previous point."
    bits = "The state is rounded just before the last token of the prompt."
    draw = partial(_chart, results, task)
    drawn = [
        draw(
            ("by-length", f"{metric} by length", _scored(task)),
            series.by_length,
            (Axis("length, in the task's unit", "log2"), score_axis(task)),
            [*levels, here],
        ),
        draw(
            ("while-training", f"{metric} during training", []),
            partial(series.by_step, field="metric"),
            (steps, score_axis(task, f"{metric} at length {task.train_length}")),
            levels,
        ),
        draw(
            ("loss", "loss during training", []),
            partial(series.by_step, field="loss"),
            (steps, Axis("training loss (nats per token)")),
        ),
        *scaling_charts(results, task, task_name(results, task)),
        draw(
            ("by-position", f"{metric} by position", [since]),
            series.by_position,
            (Axis("position (tokens)", "log2"), score_axis(task)),
            [here],
        ),
        draw(
            ("by-bits", f"{metric} by bits per number of the state", [bits]),
            series.by_bits,
            (Axis("bits per number of the state"), score_axis(task)),
            levels,
        ),
    ]
    return [chart for chart in drawn if chart is not None]


def keyword_charts(results: Results) -> list[Chart]:
    """The score by a keyword, for three or more tasks that differ only in its number."""
    drawn = []
    for (name, keyword), tasks in _families(results).items():
        some = next(iter(tasks.values()))
        lines = [
            Line(model, _by_keyword(results, model.name, tasks))
            for model in drawn_models(results).values()
        ]
        drawn.append(
            line_chart(
                f"{slug(name)}-by-{slug(keyword)}".lower(),
                f"{words(some.metric).capitalize()} by {keyword}: {name}",
                [*series.over_seeds(lines), "Each task at its training length, solved or not."],
                lines,
                (
                    Axis(keyword, ticks={value: f"{value:g}" for value in sorted(tasks)}),
                    score_axis(some, f"{words(some.metric)} at the trained length"),
                ),
                _levels(some),
            )
        )
    return [chart for chart in drawn if chart.rows]


def task_name(results: Results, task: TaskRecord) -> str:
    """A unique name for the task's section and files: ``copying``, or ``copying-2``."""
    name = slug(task.name).lower()
    same = [t.spec for t in results.tasks if slug(t.name).lower() == name]
    return name if len(same) == 1 else f"{name}-{same.index(task.spec) + 1}"


def _chart(
    results: Results,
    task: TaskRecord,
    texts: tuple[str, str, Sequence[str]],
    points: Series,
    axes: tuple[Axis, Axis],
    levels: Sequence[Level] = (),
) -> Chart | None:
    """A chart of one task with a line per model; ``None`` if no model has more than one point."""
    lines = [Line(m, points(results, m.name, task)) for m in drawn_models(results).values()]
    if max((len(line.points) for line in lines), default=0) < 2:
        return None
    x, y = axes
    name, what, notes = texts
    places = [point.x for line in lines for point in line.points]
    places += [level.x for level in levels if level.x is not None]
    if x.scale == "log2":
        x = x._replace(ticks=length_ticks(places))
    if y.domain is None:
        y = y._replace(scale=_scale([v for line in lines for p in line.points for v in p.values]))
    name = f"{task_name(results, task)}-{name}"
    title = f"{task_label(results, task)}: {what}"
    return line_chart(name, title, [*series.over_seeds(lines), *notes], lines, (x, y), levels)


def _scale(values: Sequence[float]) -> Literal["linear", "log10"]:
    """Logarithmic if the values span more than a factor of 20."""
    finite = [value for value in values if value == value]
    spans = bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)
    return "log10" if spans else "linear"


def _scored(task: TaskRecord) -> list[str]:
    if task.solved_at is None:
        return []
    return [
        "Beyond the training length, the figure shows only seeds that solved the task, and leaves "
        "out models most of whose seeds failed."
    ]


def _levels(task: TaskRecord) -> list[Level]:
    """The score that counts as solved, and the baselines."""
    solved = {} if task.solved_at is None else {"solved": task.solved_at}
    return [Level(f"{name} {y:.3g}", y=y) for name, y in (solved | task.baselines).items()]


def _by_keyword(results: Results, model: str, tasks: dict[int | float, TaskRecord]) -> list[Point]:
    return [
        Point(value, [score(run, task, task.train_length) for run in runs])
        for value, task in sorted(tasks.items())
        if (runs := runs_of(results, model, task))
    ]


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


def _is_shown(results: Results, cost: Cost) -> bool:
    """Whether a cost is known at several lengths, and anywhere above zero."""
    known = [entry.low > 0 for speed in results.speed for entry in cost.values(speed).values()]
    return len(cost_lengths(results, cost)) > 1 and any(known)


def _cost_chart(results: Results, cost: Cost) -> Chart:
    """A cost against length, both on logarithmic axes."""
    look = drawn_models(results)
    lines = [_cost_line(look[entry.model], cost.values(entry)) for entry in results.speed]
    values = [value for line in lines for point in line.points for value in point.values]
    lengths = Axis(cost.length, "log2", ticks=length_ticks(cost_lengths(results, cost)))
    name = f"cost-{slug(cost.title)}".lower()
    axes = (lengths, cost_axis(cost, values))
    return line_chart(name, cost.title, cost.notes, lines, axes, spread=("from", "to"))


def _cost_line(model: ModelStyle, values: Mapping[int, Interval]) -> Line:
    """A cost by length, without zeros, which a logarithmic axis cannot show."""
    return Line(model, [Point(n, values[n]) for n in sorted(values) if values[n].low > 0])
