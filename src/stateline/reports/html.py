"""The results of runs as one web page that needs nothing beside itself."""

import base64
import hashlib
import os
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from stateline.files import write_text
from stateline.reports import drawing, elements
from stateline.reports.cells import NOT_SOLVED, PARAMETER_TOLERANCE
from stateline.reports.figures import cost_figures, figures, keyword_figures, task_name
from stateline.reports.format import count
from stateline.reports.records import Record, sources, task_label
from stateline.reports.sentences import headline, unfinished
from stateline.reports.summary import cost_table, main_table
from stateline.reports.task_section import task_section

PLOTS = "plots"
"""The folder beside the page that holds its plots as files."""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_report(results: Record, path: str | os.PathLike[str]) -> None:
    """Write the results as a page, and its plots as files for a paper in ``plots`` beside it.

    Each file is written whole: a reader meets the old one or the new one. The same results give
    the same bytes. The page has no need of the plots' files.

    Args:
        results: What ``stateline compare`` wrote, finished or not, or several such, merged.
        path: The file to write.

    Raises:
        InputError: If the folder cannot be written to.
    """
    target = Path(path)
    write_text(target, page(results))
    for figure in figures(results):
        drawing.save(figure.draw, figure.models, target.parent / PLOTS / figure.name)


def page(results: Record) -> str:
    """The results as a page that needs nothing beside itself."""
    template = files("stateline.reports").joinpath("template.html").read_text(encoding="utf-8")
    text = Template(template).substitute(
        title=escape(_title(results)),
        colours=" ".join(f"--model-{n}: {c};" for n, c in enumerate(drawing.COLOURS)),
        policy=_policy(template),
        body=_body(results),
    )
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _policy(template: str) -> str:
    """Content security: nothing is loaded, and no script runs but the template's own."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _title(results: Record) -> str:
    models = results["models"]
    return f"Stateline: {models[0] if len(models) == 1 else f'{len(models)} models compared'}"


def _body(results: Record) -> str:
    parts = [elements.keys(results["models"]), _opening(results), _overview(results)]
    parts += [task_section(results, task) for task in results["tasks"]]
    parts += [_by_keyword(results)] if keyword_figures(results) else []
    parts += [_costs(results)] if results["speed"] else []
    return "\n".join([*parts, _origin(results)])


def _opening(results: Record) -> str:
    warning = unfinished(results)
    commands = "".join(
        f'{_run_title(source)}<pre class="command">{escape(source["command"])}</pre>\n'
        for source in sources(results)
    )
    return f"""<header>
<h1>{escape(_title(results))}</h1>
<p class="lead">{escape(headline(results))}</p>
{f'<p class="unfinished">{escape(warning)}</p>' if warning else ""}
<p class="quiet">Run it again with</p>
{commands}</header>"""


def _run_title(source: Record) -> str:
    """Which of several runs it is; nothing where there is one."""
    folder = source["folder"]
    return f'<p class="run quiet">in <code>{escape(folder)}</code></p>\n' if folder else ""


def _overview(results: Record) -> str:
    links = {task_label(results, task): task_name(results, task) for task in results["tasks"]}
    off = f"more than {PARAMETER_TOLERANCE:.0%} off the wanted number"
    return f"""<section>
<h2>Results</h2>
{elements.table(main_table(results), links)}
<p class="quiet">Tinted: the best of its column. Several seeds: the median, and beneath it the
lowest and highest. “{NOT_SOLVED.text}”: the model missed the score wanted at the length it trained
on, so it is not scored at another. † {off}.
<span class="scripted">A click on a heading sorts.</span></p>
</section>"""


def _by_keyword(results: Record) -> str:
    """Tasks side by side that differ in one number."""
    drawn = keyword_figures(results)
    return f"""<section id="by-keyword">
<h2>By keyword</h2>
{elements.legend(drawn[0].models, "wide")}
<div class="plots">{"".join(map(elements.figure, drawn))}</div>
</section>"""


def _costs(results: Record) -> str:
    drawn = "".join(map(elements.figure, cost_figures(results)))
    machine = "machine" if len(sources(results)) == 1 else "machines"
    return f"""<section id="cost">
<h2>Cost</h2>
<p>What the models need, at the size at which they were compared, on the {machine} named below.
Equal lines are nested.</p>
{elements.legend(enumerate(results["models"]), "wide")}
<div class="plots">{drawn}
{elements.table(cost_table(results))}</div>
</section>"""


def _origin(results: Record) -> str:
    """Where the numbers come from, the data and the machines; and where the plots lie."""
    records = "".join(
        f"<h3>{escape(task_label(results, task))}</h3>{elements.definitions(task['data'])}"
        for task in results["tasks"]
        if task["data"]
    )
    environments = "\n".join(
        _run_title(source)
        + elements.definitions({"created": source["created"], **source["environment"]})
        for source in sources(results)
    )
    names = {figure.name: None for figure in figures(results)}
    lie = (
        f"{count(len(names), 'plot')} of this page lie in the folder <code>{PLOTS}</code> beside it"
    )
    return f"""<section>
<h2>Data and environment</h2>
{records}
<h3>Environment</h3>
{environments}
<h3>Plots as files</h3>
<p>{lie}, as PNG (300 dots per inch) and as SVG.</p>
</section>"""
