"""The section of a report on one task: who solved it, plots, tables, and what was trained how."""

from functools import partial
from html import escape

from stateline.reports import elements
from stateline.reports.figures import task_figures, task_name
from stateline.reports.format import words
from stateline.reports.records import Record, runs_of, task_label
from stateline.reports.sentences import baselines, verdict
from stateline.reports.summary import length_table, run_table, training_table


def task_section(results: Record, task: Record) -> str:
    """Everything on one task, as HTML."""
    solved = "" if task["solved_at"] is None else f", solved from {task['solved_at']:g}"
    scored = f"Scored by {words(task['metric'])}{solved}. Trained at length {task['train_length']}."
    summary = " ".join(filter(None, [verdict(results, task), baselines(task)]))
    models = [model for model in results["models"] if runs_of(results, model, task)]
    return f"""<section id="{task_name(results, task)}">
<h2>{escape(task_label(results, task))}</h2>
<p class="quiet"><code>{escape(task["spec"])}</code> {escape(scored)}</p>
<p>{escape(task["about"])}</p>
<p class="verdict">{escape(summary)}</p>
{_numbers(results, task, models) if models else ""}
</section>"""


def _numbers(results: Record, task: Record, models: list[str]) -> str:
    figures = task_figures(results, task)
    table = partial(elements.table, shown=models)
    training = training_table(results, task)
    return f"""{elements.legend(figures[0].models, "wide")}
<div class="plots">{"".join(map(elements.figure, figures))}</div>
<h3>{"Training" if task["solved_at"] is None else "Steps to solve"}</h3>
{table(run_table(results, task))}
{elements.folded("Scores at every length", table(length_table(results, task)))}
{elements.folded("Training configuration", table(training)) if training.columns else ""}
{_samples(results, task, models)}"""


def _samples(results: Record, task: Record, models: list[str]) -> str:
    """What the models wrote, where they were let."""
    return "\n".join(
        elements.folded(
            f"Written by {model}, seed {run['seed']}",
            f'<pre class="sample">{escape(run["sample"])}</pre>',
        )
        for model in models
        for run in runs_of(results, model, task)
        if "sample" in run
    )
