"""Pages of one file: templates, charts, scripts, and the rule that nothing else may run."""

import base64
import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from stateline.charts.chart import Chart
from stateline.charts.draw import CannotDrawError
from stateline.charts.export import bundle, pictures, table
from stateline.charts.style import COLOURS, DARK_COLOURS, VARIABLES, ModelStyle
from stateline.reports.format import words

_log = logging.getLogger("stateline")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Script(NamedTuple):
    """A script of a page; the page's security policy allows only scripts with a known digest."""

    text: Markup
    digest: str


class Key(NamedTuple):
    """An entry of the legend: a model, or an architecture in several sizes."""

    name: str
    model: ModelStyle
    members: list[str]


def render(template: str, charts: Iterable[Chart], **content: Any) -> str:
    """A page that loads nothing and runs only its own scripts.

    Args:
        template: Name of the template; it extends ``base.html``.
        charts: All charts of the page; a script makes them interactive. Where nothing can be drawn,
            the page has their numbers, and says why.
        content: What the template shows.
    """
    charts = list(charts)
    specs = {chart.name: _spec(chart) for chart in charts}
    inline: dict[str, Markup] = {}
    scripts: list[Script] = []
    undrawn = ""
    try:
        inline = dict(zip(specs, map(_inline, specs, pictures(specs.values())), strict=True))
        scripts = [_script(bundle())]
    except CannotDrawError as error:
        undrawn = f"The charts are given as numbers: {error}."
        _log.warning("the page has numbers in the place of charts: %s", error)
    templates = _environment()
    own = templates.get_template("page.js").render()
    text = templates.get_template(template).render(
        **content,
        style=Markup(_style()),
        specs=specs,
        pictures=inline,
        numbers={} if inline else {chart.name: table(chart) for chart in charts},
        undrawn=undrawn,
        scripts=[*scripts, _script(own)],
    )
    return printable(text)


@cache
def _environment() -> Environment:
    """Where templates are compiled, once each."""
    environment = Environment(
        loader=PackageLoader("stateline.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": _breakable, "words": words, "shared_notes": _shared_notes}
    return environment


def printable(text: str) -> str:
    """The text with U+FFFD for control characters and for what UTF-8 cannot encode."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _script(text: str) -> Script:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(Markup(text), digest)


def _style() -> str:
    """Rules that give the colours of models, and of charts, a variable in each scheme."""

    def variables(colours: Iterable[str]) -> str:
        return " ".join(f"--model-{index}: {colour};" for index, colour in enumerate(colours))

    rules = [
        f":root {{ {variables(COLOURS)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK_COLOURS)} }} }}",
    ]
    for colour, variable in VARIABLES.items():
        for name in ("fill", "stroke"):
            rules.append(f'.chart [{name}="{colour}"] {{ {name}: var({variable}); }}')
    return "\n".join(rules)


def _spec(chart: Chart) -> dict[str, Any]:
    """The specification of a chart without the address of its schema."""
    spec = chart.spec(alone=False)
    del spec["$schema"]
    return spec


def _inline(name: str, picture: str) -> Markup:
    """A chart as a picture for readers without scripts; its ids begin with its name."""
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", picture)
    return Markup(re.sub(r'(\bid="|url\(#)', rf"\g<1>{name}-", text))


def _shared_notes(charts: Sequence[Chart]) -> list[str]:
    """The sentences that all of several charts have in common; they stand once, below them."""
    first, *others = charts
    return [note for note in first.notes if others and all(note in c.notes for c in others)]


def _breakable(text: str) -> Markup:
    """A pattern that may break after brackets, commas, equals signs and underscores."""
    return Markup(re.sub("(?<=[(,=_])", "<wbr>", str(escape(text))))
