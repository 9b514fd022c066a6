"""The parts that a report is made of, as HTML. All text from the results passes ``escape``."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape

from matplotlib.axes import Axes

from stateline.reports import plots
from stateline.reports.summary import MISSING, NOT_SOLVED, Cell, Column, Table


def pattern(text: str) -> str:
    """A model's pattern, which may break where a reader would break it."""
    return f"<code>{re.sub('(?<=[(,=_])', '<wbr>', escape(text))}</code>"


def keys(models: Sequence[str]) -> str:
    """The line of each model once, unseen, for tables and legends to refer to."""
    drawn = []
    for index, model in enumerate(models):
        svg = plots.svg(partial(plots.key, index=index), _key(index), model, plots.KEY_SIZE)
        drawn.append(svg.replace("<svg", f'<svg id="{_key(index)}"', 1))
    return f'<div class="keys" aria-hidden="true">{"".join(drawn)}</div>'


def legend(models: Sequence[str], kind: str = "") -> str:
    """Each model beside its line."""
    entries = "".join(f"<li>{_named(index, model)}</li>" for index, model in enumerate(models))
    return f'<ul class="legend {kind}">{entries}</ul>'


def figure(
    draw: Callable[[Axes], None], models: Sequence[str], name: str, title: str, note: str
) -> str:
    """A plot under its title and legend, with a sentence on how to read it."""
    svg = plots.svg(draw, name, f"{title}: line plot with one line per model. {note}")
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure>{caption}{legend(models)}{svg}<p class="quiet">{escape(note)}</p></figure>'


def table(content: Table, links: Mapping[str, str] | None = None) -> str:
    """A table that scrolls inside its own box, its best cells tinted.

    Args:
        content: What to show.
        links: The id of the section that a group of columns should lead to.
    """
    starts = _starts(content.columns)
    groups = itertools.groupby(content.columns, key=lambda column: column.group)
    top = "".join(_group(name, list(columns), links or {}) for name, columns in groups)
    below = "".join(
        f'<th scope="col" class="{start}">{escape(column.heading)}</th>'
        for column, start in zip(content.columns, starts, strict=True)
        if column.group
    )
    head = f'<tr><th class="model" scope="col" rowspan="2">model</th>{top}</tr><tr>{below}</tr>'
    body = "".join(
        f'<tr><th class="model" scope="row">{_named(index, model)}</th>'
        f"{''.join(map(_cell, cells, starts))}</tr>"
        for index, (model, cells) in enumerate(content.rows())
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>
<thead>{head}</thead>
<tbody>{body}</tbody>
</table></div>"""


def definitions(content: Mapping[str, object]) -> str:
    """Names and values; a list is folded away behind its length."""
    entries = (
        f"<dt>{escape(k.replace('_', ' '))}</dt><dd>{_value(v)}</dd>" for k, v in content.items()
    )
    return f"<dl>{''.join(entries)}</dl>"


def _key(index: int) -> str:
    return f"key-{index}"


def _named(index: int, model: str) -> str:
    key = f'<svg class="key" aria-hidden="true"><use href="#{_key(index)}"/></svg>'
    return f'<span class="named">{key}{pattern(model)}</span>'


def _starts(columns: Sequence[Column]) -> list[str]:
    """The class of each column: ``start`` where a group begins."""
    before = ["", *(column.group for column in columns)]
    return [
        "start" if column.group != group else ""
        for column, group in zip(columns, before, strict=False)
    ]


def _group(name: str, columns: list[Column], links: Mapping[str, str]) -> str:
    """The upper line of headings: a group's name, or whole headings where there is none."""
    if not name:
        headings = (escape(column.heading) for column in columns)
        return "".join(f'<th scope="col" rowspan="2">{heading}</th>' for heading in headings)
    text = f'<a href="#{links[name]}">{escape(name)}</a>' if name in links else escape(name)
    return f'<th class="group start" scope="colgroup" colspan="{len(columns)}">{text}</th>'


def _cell(cell: Cell, start: str) -> str:
    quiet = "none" if cell.text in (MISSING.text, NOT_SOLVED.text) else ""
    kind = " ".join(filter(None, [start, "best" if cell.best else quiet]))
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    return f'<td class="{kind}">{"†" if cell.off else ""}{escape(cell.text)}{note}</td>'


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return definitions(value)
    if isinstance(value, list | tuple):
        items = "".join(f"<li>{escape(str(item))}</li>" for item in value)
        return f"<details><summary>{len(value)} in all</summary><ul>{items}</ul></details>"
    return escape(f"{value:,}" if type(value) is int else str(value))
