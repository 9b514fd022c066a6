"""A comparison as one web page that needs nothing beside itself."""

import os
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from stateline.reports import elements, plots
from stateline.reports.format import count, words
from stateline.reports.sentences import baselines, headline, unfinished, verdict
from stateline.reports.summary import (
    DECODING,
    FLOPS,
    NOT_SOLVED,
    PARAMETER_TOLERANCE,
    STATE,
    TRAINING,
    Record,
    cost_lengths,
    cost_table,
    length_table,
    main_table,
    run_table,
    runs_of,
    task_label,
)


def write_report(results: Record, path: str | os.PathLike[str]) -> None:
    """Write the comparison as a page, whole: a reader meets the old file or the new one.

    The same results give the same bytes.

    Args:
        results: What ``stateline compare`` wrote, finished or not.
        path: The file to write, in a folder that exists.
    """
    template = files("stateline.reports").joinpath("template.html").read_text(encoding="utf-8")
    title = f"Stateline: {count(len(results['models']), 'model')} compared"
    page = Template(template).substitute(title=escape(title), body=_body(results, title))
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _body(results: Record, title: str) -> str:
    parts = [elements.keys(results["models"]), _opening(results, title), _overview(results)]
    parts += [_task(results, task, name) for name, task in _named_tasks(results)]
    parts += [_costs(results)] if results["speed"] else []
    return "\n".join([*parts, _origin(results)])


def _named_tasks(results: Record) -> list[tuple[str, Record]]:
    """Each task with the id of its section."""
    return [(f"task-{number}", task) for number, task in enumerate(results["tasks"], start=1)]


def _opening(results: Record, title: str) -> str:
    warning = unfinished(results)
    return f"""<header>
<h1>{escape(title)}</h1>
<p class="lead">{escape(headline(results))}</p>
{f'<p class="unfinished">{escape(warning)}</p>' if warning else ""}
<p class="quiet">Run it again with</p>
<pre class="command">{escape(results["command"])}</pre>
</header>"""


def _overview(results: Record) -> str:
    links = {task_label(results, task): name for name, task in _named_tasks(results)}
    off = f"more than {PARAMETER_TOLERANCE:.0%} off the wanted number"
    return f"""<section>
<h2>Results</h2>
{elements.table(main_table(results), links)}
<p class="quiet">Tinted: the best of its column. Several seeds: the median, and beneath it the
lowest and highest. “{NOT_SOLVED.text}”: the model missed the score wanted at the length it trained
on, so it is not scored at another. † {off}.</p>
</section>"""


def _task(results: Record, task: Record, name: str) -> str:
    solved = "" if task["solved_at"] is None else f", solved from {task['solved_at']:g}"
    scored = f"Scored by {words(task['metric'])}{solved}. Trained at length {task['train_length']}."
    summary = " ".join(filter(None, [verdict(results, task), baselines(task)]))
    trained = any(runs_of(results, model, task) for model in results["models"])
    return f"""<section id="{name}">
<h2>{escape(task_label(results, task))}</h2>
<p class="quiet"><code>{escape(task["spec"])}</code> {escape(scored)}</p>
<p>{escape(task["about"])}</p>
<p class="verdict">{escape(summary)}</p>
{_task_numbers(results, task, name) if trained else ""}
</section>"""


def _task_numbers(results: Record, task: Record, name: str) -> str:
    training = "Training" if task["solved_at"] is None else "Steps to solve"
    return f"""{elements.legend(results["models"], "wide")}
<div class="plots">{"".join(_task_figures(results, task, name))}</div>
<h3>{training}</h3>
{elements.table(run_table(results, task))}
<details><summary>Scores at every length</summary>
{elements.table(length_table(results, task))}
</details>"""


def _task_figures(results: Record, task: Record, name: str) -> list[str]:
    metric = words(task["metric"]).capitalize()
    figure = partial(elements.figure, models=results["models"])
    curve = partial(plots.learning_curve, results=results, task=task)
    ended = "A line per seed, with a marker where training stopped."
    median = "Median over seeds; the band is from lowest to highest. Equal lines are nested."
    if task["solved_at"] is not None:
        median += " Solid: seeds that solved the training length. Dashed: models that did not."
    return [
        figure(
            partial(plots.by_length, results=results, task=task),
            name=f"{name}-length",
            title=f"{metric} by length",
            note=median,
        ),
        figure(
            partial(curve, field="metric"),
            name=f"{name}-metric",
            title=f"{metric} while training",
            note=ended,
        ),
        figure(
            partial(curve, field="loss"),
            name=f"{name}-loss",
            title="Loss while training",
            note=ended,
        ),
    ]


def _costs(results: Record) -> str:
    figures = [
        elements.figure(
            partial(plots.cost_by_length, results=results, cost=cost),
            models=results["models"],
            name=cost.field.replace("_", "-"),
            title=cost.title,
            note=cost.note,
        )
        for cost in (STATE, DECODING, TRAINING, FLOPS)
        if cost_lengths(results, cost)
    ]
    return f"""<section id="cost">
<h2>Cost</h2>
<p>What the models need, at the size at which they were compared, on the machine named below.
Equal lines are nested.</p>
{elements.legend(results["models"], "wide")}
<div class="plots">{"".join(figures)}
{elements.table(cost_table(results))}</div>
</section>"""


def _origin(results: Record) -> str:
    """Where the numbers come from: the data and the machine."""
    records = "".join(
        f"<h3>{escape(task_label(results, task))}</h3>{elements.definitions(task['data'])}"
        for task in results["tasks"]
        if task["data"]
    )
    return f"""<section>
<h2>Data and environment</h2>
{records}
<h3>Environment</h3>
{elements.definitions({"created": results["created"], **results["environment"]})}
</section>"""
