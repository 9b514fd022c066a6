"""The results of runs as one self-contained web page."""

import base64
import hashlib
import itertools
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from stateline.files import check_writable, write_text
from stateline.reports import drawing
from stateline.reports.figures import (
    Figure,
    cost_figures,
    figures,
    keyword_figures,
    task_figures,
    task_name,
)
from stateline.reports.format import count, words
from stateline.reports.records import runs_of, task_label
from stateline.reports.sentences import baselines, headline, unfinished, verdict
from stateline.reports.summary import (
    cost_table,
    length_table,
    main_table,
    run_table,
    training_table,
)
from stateline.reports.table_cells import NOT_SOLVED, PARAMETER_TOLERANCE
from stateline.runs.results import Results, TaskRecord

PLOTS = "plots"
"""The folder next to the page that holds its plots as files."""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_report(results: Results, path: str | os.PathLike[str]) -> None:
    """Write the results as a page, and its plots as files into the folder ``plots`` next to it.

    Files are written atomically. The same results give the same bytes. The page does not need the
    files of its plots.

    Args:
        results: Results of one comparison, finished or not, or of several, merged.
        path: The file to write.

    Raises:
        InputError: If the folder cannot be written to.
    """
    target = Path(path)
    check_report(target)
    write_text(target, page(results))
    for figure in figures(results):
        drawing.save(figure.draw, figure.models, target.parent / PLOTS / figure.name)


def check_report(path: Path) -> None:
    """Check that a report can be written.

    Raises:
        InputError: If the page, or a file in the folder of its plots, cannot be written.
    """
    check_writable(path)
    check_writable(path.parent / PLOTS / "plot.svg")


def page(results: Results) -> str:
    """The results as a self-contained page."""
    environment = Environment(
        loader=PackageLoader("stateline.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"svg": _svg, "breakable": _breakable, "words": words}
    script = environment.get_template("sort.js").render()
    text = environment.get_template("report.html").render(
        **_content(results),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return printable(text)


def printable(text: str) -> str:
    """The text with U+FFFD for control characters and for what UTF-8 cannot encode."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _content(results: Results) -> dict[str, Any]:
    """What the template of the page shows."""
    names = {figure.name for figure in figures(results)}
    labels = {task.spec: task_label(results, task) for task in results.tasks}
    models = results.models
    title = models[0] if len(models) == 1 else f"{len(models)} models compared"
    return {
        "results": results,
        "title": f"Stateline: {title}",
        "colours": drawing.COLOURS,
        "models": list(enumerate(models)),
        "keys": [_key(index, model) for index, model in enumerate(models)],
        "headline": headline(results),
        "unfinished": unfinished(results),
        "main_table": main_table(results),
        "links": {labels[task.spec]: task_name(results, task) for task in results.tasks},
        "not_solved": NOT_SOLVED.text,
        "off": f"more than {PARAMETER_TOLERANCE:.0%} off the intended number of parameters",
        "tasks": [_task(results, task) for task in results.tasks],
        "keyword_figures": keyword_figures(results),
        "cost_figures": cost_figures(results),
        "cost_table": cost_table(results),
        "data": [(labels[task.spec], task.data) for task in results.tasks if task.data],
        "plots": count(len(names), "plot"),
        "plots_folder": PLOTS,
    }


def _task(results: Results, task: TaskRecord) -> dict[str, Any]:
    """What the template of a task's section shows."""
    solved = "" if task.solved_at is None else f", solved from {task.solved_at:g}"
    scored = f"Scored by {words(task.metric)}{solved}."
    models = [model for model in results.models if runs_of(results, model, task)]
    runs = itertools.chain.from_iterable(runs_of(results, model, task) for model in models)
    return {
        "record": task,
        "id": task_name(results, task),
        "label": task_label(results, task),
        "scoring": f"{scored} Trained at length {task.train_length}.",
        "verdict": " ".join(filter(None, [verdict(results, task), baselines(task)])),
        "models": models,
        "figures": task_figures(results, task),
        "run_table": run_table(results, task),
        "length_table": length_table(results, task),
        "training_table": training_table(results, task),
        "samples": [run for run in runs if run.sample is not None],
    }


def _key(index: int, model: str) -> Markup:
    """The line of a model, drawn once and hidden, for tables and legends to refer to."""
    name = f"key-{index}"
    svg = drawing.svg(partial(drawing.key, index=index), name, model, drawing.KEY_SIZE)
    return Markup(svg.replace("<svg", f'<svg id="{name}"', 1))


def _svg(figure: Figure) -> Markup:
    label = f"{figure.title}: line plot with one line per model. {figure.note}"
    return Markup(drawing.svg(figure.draw, figure.name, label))


def _breakable(text: str) -> Markup:
    """A pattern that may break after brackets, commas, equals signs and underscores."""
    return Markup(re.sub("(?<=[(,=_])", "<wbr>", str(escape(text))))
