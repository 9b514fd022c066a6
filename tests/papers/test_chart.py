"""The figures of tables."""

import json
from pathlib import Path

import msgspec
import pytest

from stateline.papers.chart import draw
from stateline.papers.record import RecordedRow, TableRecord
from stateline.papers.table import Table, make_table

ROWS = [
    {"label": "A", "x": 4, "pattern": "h3"},
    {"label": "A", "x": 2, "pattern": "h3"},
    {"label": "B", "x": 2, "pattern": "lstm"},
]


def table(plot: str, longest: int = 20) -> Table:
    columns = [{"at": 10}, {"at": longest}]
    content = {"paper": "p", "place": "figure 1", "claim": "c", "columns": columns, "rows": ROWS}
    return make_table(
        {**content, "plot": plot, "x_title": "heads", "sizes": {"laptop": {"cost": ""}}},
        Path("t.yaml"),
    )


RECORD = TableRecord(
    **{"table": "p/t", "size": "laptop", "command": "", "created": "2026-01-01"},
    environment={},
    columns=["bits at 10", "at 20"],
    rows=[
        RecordedRow(
            **{"label": "A", "x": 4, "seeds": [0, 1], "values": [[1.0, 2.0], [3.0, None]]},
            curves=[{1: 0.1, 2: 0.2}, {1: 0.3}],  # the second diverged
        ),
        RecordedRow(
            **{"label": "A", "x": 2, "seeds": [0, 1], "values": [[5.0, 6.0], [7.0, 8.0]]},
            curves=[{1: 0.1, 2: 0.2}, {1: 0.1, 2: 1.2}],
        ),
        RecordedRow(label="B", x=2, seeds=[0, 1], values=[[0.0, 0.0], [0.0, 0.0]]),
    ],
)


def drawn(plot: str) -> list[list[tuple[str, float, float, int]]]:
    charts = draw(table(plot), RECORD)
    return [[(r["model"], r["x"], r["y"], r["values"]) for r in chart.rows] for chart in charts]


def test_each_column_has_a_chart_over_the_number_of_the_rows() -> None:
    zeros = ("B", 2.0, 0.0, 2)
    assert drawn("x") == [
        [("A", 2.0, 5.5, 2), ("A", 4.0, 1.5, 2), zeros],
        [("A", 2.0, 7.5, 2), ("A", 4.0, 3.0, 1), zeros],
    ]


def test_scores_are_drawn_by_length() -> None:
    (chart,) = drawn("length")
    assert chart[:4] == [
        *[("A, 4", 10, 1.5, 2), ("A, 4", 20, 3.0, 1)],
        *[("A, 2", 10, 5.5, 2), ("A, 2", 20, 7.5, 2)],
    ]


def test_the_axis_of_scores_names_what_the_columns_measure() -> None:
    (chart,) = draw(table("length"), RECORD)
    assert any("bits" in json.dumps(layer["encoding"]) for layer in chart.spec()["layer"])


@pytest.mark.parametrize(("longest", "wide"), [(20, False), (160, True)])
def test_the_axis_of_lengths_is_logarithmic_over_a_wide_range(longest: int, wide: bool) -> None:
    (chart,) = draw(table("length", longest), RECORD)
    assert ('"type": "log"' in json.dumps(chart.spec()["layer"])) == wide


def test_scores_are_drawn_by_updates_as_far_as_all_seeds_have_come() -> None:
    (chart,) = drawn("updates")
    assert chart[0] == ("A, 4", 1, pytest.approx(0.2), 2)
    assert [(model, x) for model, x, _, _ in chart[1:3]] == [("A, 2", 1), ("A, 2", 2)]


def test_a_table_without_a_plot_has_no_chart() -> None:
    assert drawn("none") == []


def test_a_record_without_curves_is_not_drawn_over_updates() -> None:
    rows = [msgspec.structs.replace(row, curves=[]) for row in RECORD.rows]
    assert draw(table("updates"), msgspec.structs.replace(RECORD, rows=rows)) == []
