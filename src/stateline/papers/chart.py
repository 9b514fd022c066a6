"""A figure of a paper, drawn from the record of its rows."""

import math
from collections.abc import Mapping, Sequence

from stateline.charts.chart import Axis, Chart
from stateline.charts.lines import Line, Point, line_chart
from stateline.charts.style import ModelStyle, styled
from stateline.papers.record import TableRecord
from stateline.papers.table import Table


def draw(table: Table, record: TableRecord) -> list[Chart]:
    """The charts of a table: none, one, or one per column if the rows have an ``x``."""
    if not has_chart(table, record):
        return []
    over_x = table.plot == "x"
    names = dict.fromkeys(row.label if over_x else row.name for row in record.rows)
    models = {model.name: model for model in styled(list(names))}
    title = f"{table.paper}, {table.place}, {record.size} size"
    if over_x:
        return [
            _chart(f"chart-{n + 1}", title, _by_x(record, models, n), Axis(table.x_title), heading)
            for n, heading in enumerate(record.columns)
        ]
    if table.plot == "updates":
        return [_chart("chart", title, _curves(record, models), Axis(table.plot), "score")]
    columns = enumerate(table.columns_of(record.size))
    places = [(n, column.at) for n, column in columns if column.at is not None]
    headings = (record.columns[n].partition(" at ") for n, _ in places)
    unit = next((unit for unit, at, _ in headings if at), "score")  # of "bits per byte at 512"
    wide = bool(places) and places[-1][1] >= 16 * places[0][1]
    lengths = Axis(table.plot, "log2" if wide else "linear")
    return [_chart("chart", title, _by_length(record, models, places), lengths, unit)]


def has_chart(table: Table, record: TableRecord) -> bool:
    """Whether a table is drawn, and its record has what is drawn."""
    if table.plot == "updates":
        return any(row.curves for row in record.rows)
    return table.plot != "none" and bool(record.rows)


def _chart(name: str, title: str, lines: Sequence[Line], x: Axis, y: str) -> Chart:
    notes = ["Lines are medians over seeds, bands reach from the lowest to the highest."]
    return line_chart(name, title, notes, lines, (x, Axis(y)))


def _curves(record: TableRecord, models: Mapping[str, ModelStyle]) -> list[Line]:
    """Scores while training, at the updates that all seeds have reached."""
    lines = []
    for row in record.rows:
        steps = sorted(set.intersection(*map(set, row.curves))) if row.curves else []
        points = [Point(s, [curve[s] for curve in row.curves], marked=False) for s in steps]
        lines.append(Line(models[row.name], points))
    return lines


def _by_length(
    record: TableRecord, models: Mapping[str, ModelStyle], places: Sequence[tuple[int, int]]
) -> list[Line]:
    """A line per row: its values by length, given the places of columns and their lengths."""
    return [
        Line(models[row.name], [Point(at, _numbers(row.values[place])) for place, at in places])
        for row in record.rows
    ]


def _by_x(record: TableRecord, models: Mapping[str, ModelStyle], place: int) -> list[Line]:
    return [
        Line(
            model,
            sorted(
                Point(row.x or 0.0, _numbers(row.values[place]))
                for row in record.rows
                if row.label == name
            ),
        )
        for name, model in models.items()
    ]


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
