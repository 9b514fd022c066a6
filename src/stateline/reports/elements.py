"""The parts that a report is made of, as HTML. All text from the results passes ``escape``."""

import itertools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from html import escape

from stateline.reports import drawing
from stateline.reports.cells import MISSING, NOT_SOLVED, Cell
from stateline.reports.figures import Figure
from stateline.reports.summary import Column, Table


def pattern(text: str) -> str:
    """A model's pattern, which may break where a reader would break it."""
    return f"<code>{re.sub('(?<=[(,=_])', '<wbr>', escape(text))}</code>"


def keys(models: Sequence[str]) -> str:
    """The line of each model once, unseen, for tables and legends to refer to."""
    drawn = []
    for index, model in enumerate(models):
        draw = partial(drawing.key, index=index)
        svg = drawing.svg(draw, _key(index), model, drawing.KEY_SIZE)
        drawn.append(svg.replace("<svg", f'<svg id="{_key(index)}"', 1))
    return f'<div class="keys" aria-hidden="true">{"".join(drawn)}</div>'


def legend(models: Iterable[tuple[int, str]], kind: str = "") -> str:
    """Each model, by its number and name, beside its line."""
    entries = "".join(f"<li>{_named(index, model)}</li>" for index, model in models)
    return f'<ul class="legend {kind}">{entries}</ul>'


def figure(content: Figure) -> str:
    """A plot under its title and legend, with a sentence on how to read it."""
    label = f"{content.title}: line plot with one line per model. {content.note}"
    svg = drawing.svg(content.draw, content.name, label)
    return f"""<figure><figcaption>{escape(content.title)}</figcaption>
{legend(content.models)}{svg}<p class="quiet">{escape(content.note)}</p></figure>"""


def table(
    content: Table, links: Mapping[str, str] | None = None, shown: Container[str] | None = None
) -> str:
    """A table that scrolls inside its own box, its best cells tinted.

    What a script needs to sort it stands in it: the number of each column, the value of each cell.

    Args:
        content: What to show.
        links: The id of the section that a group of columns should lead to.
        shown: The models that have a row; by default all.
    """
    starts = _starts(content.columns)
    numbered = list(enumerate(content.columns, start=1))
    groups = itertools.groupby(numbered, key=lambda pair: pair[1].group)
    top = "".join(_group(name, list(columns), links or {}) for name, columns in groups)
    below = "".join(
        f'<th scope="col" data-column="{number}" class="{start}">{escape(column.heading)}</th>'
        for (number, column), start in zip(numbered, starts, strict=True)
        if column.group
    )
    first = '<th class="model" scope="col" data-column="0" rowspan="2">model</th>'
    head = f"<tr>{first}{top}</tr><tr>{below}</tr>"
    body = "".join(
        f'<tr><th class="model" scope="row">{_named(index, model)}</th>'
        f"{''.join(map(_cell, cells, starts))}</tr>"
        for index, (model, cells) in enumerate(content.rows())
        if shown is None or model in shown
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>
<thead>{head}</thead>
<tbody>{body}</tbody>
</table></div>"""


def folded(title: str, content: str) -> str:
    """Markup that shows when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


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


def _group(name: str, columns: list[tuple[int, Column]], links: Mapping[str, str]) -> str:
    """The upper line of headings: a group's name, or whole headings where there is none."""
    if not name:
        return "".join(
            f'<th scope="col" data-column="{number}" rowspan="2">{escape(column.heading)}</th>'
            for number, column in columns
        )
    text = f'<a href="#{links[name]}">{escape(name)}</a>' if name in links else escape(name)
    return f'<th class="group start" scope="colgroup" colspan="{len(columns)}">{text}</th>'


def _cell(cell: Cell, start: str) -> str:
    quiet = "none" if cell.text in (MISSING.text, NOT_SOLVED.text) else ""
    kind = " ".join(filter(None, [start, "best" if cell.best else quiet]))
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f'<td class="{kind}"{value}>{"†" if cell.off else ""}{escape(cell.text)}{note}</td>'


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return definitions(value)
    if isinstance(value, list | tuple):
        items = "".join(f"<li>{escape(str(item))}</li>" for item in value)
        return folded(f"{len(value)} in all", f"<ul>{items}</ul>")
    return escape(f"{value:,}" if type(value) is int else str(value))
