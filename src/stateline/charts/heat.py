"""Heat maps: a number for each cell of a grid."""

from collections.abc import Sequence

import altair as alt

from stateline.charts.chart import Chart


def heat_map(
    name: str,
    title: str,
    notes: Sequence[str],
    cells: Sequence[tuple[int, int, float]],
    titles: tuple[str, str, str],
) -> Chart:
    """A chart of the numbers of a grid as colours.

    Args:
        name: Unique in a report; also the name of its files.
        title: What is shown.
        notes: How to read it, in sentences.
        cells: Column, row and number of each cell.
        titles: What columns, rows and numbers are.
    """
    columns, rows, numbers = titles
    places = {
        "x": alt.X("x:O", title=columns, axis=alt.Axis(labelAngle=0)),
        "y": alt.Y("y:O", title=rows, sort="ascending"),
        "color": alt.Color("value:Q", title=numbers, scale=alt.Scale(scheme="blues", clamp=True)),
    }
    fields = (("x:O", columns), ("y:O", rows), ("value:Q", numbers))
    shown = [alt.Tooltip(field, title=text) for field, text in fields]
    data = [{"model": "", "x": x, "y": y, "value": value} for x, y, value in cells]
    return Chart(
        name,
        title,
        tuple(notes),
        [],
        data,
        [alt.Chart().mark_rect().encode(**places, tooltip=shown)],
    )
