"""The results of runs as one self-contained web page."""

import itertools
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stateline.charts.chart import Chart
from stateline.charts.export import write_charts
from stateline.files import check_writable, write_text
from stateline.reports.answers import Answers, answers
from stateline.reports.budgets import Budget
from stateline.reports.conclusions import PairRow, conclusions, pair_rows
from stateline.reports.costs import disturbance
from stateline.reports.decision import (
    CHOSEN,
    decisions,
    elsewhere,
    fastest_solvers,
    headings,
    question,
    solvers,
)
from stateline.reports.figures import sections, task_name
from stateline.reports.format import count, listing, words
from stateline.reports.outlook import outlook
from stateline.reports.page import Key, render
from stateline.reports.records import drawn_models, families, looks, runs_of, task_label
from stateline.reports.sentences import (
    ONE_RATE,
    ONE_SEED,
    QUICK,
    baselines,
    caution,
    headline,
    protocol,
    size_groups,
    spent,
    unfinished,
)
from stateline.reports.summary import (
    all_runs_table,
    cost_table,
    length_table,
    main_table,
    run_table,
    shared_settings,
    training_table,
    trials_table,
)
from stateline.reports.table_cells import NOT_SOLVED
from stateline.runs.protocol_records import TOLERANCE
from stateline.runs.results import Results, TaskRecord
from stateline.runs.verdict import ERROR_RATE

JUDGED = (
    "“Clearly” means: by Welch's t-test over the seeds. Where some seeds solve the task and others "
    "are far from it, or the seeds of each model agree to within the sampling error, so that they "
    "do not show how seeds vary, the shares of the better seeds are compared. Of comparisons of "
    "equal models, at most {rate:.0%} tell any pair of a task apart at one length{looks}."
)
WIDEST, WIDEST_WITH_SPREADS = 14, 10
"""Columns of a table that fit a page of 1,280 pixels, of one seed and of several."""

ADVICE = {
    QUICK: "Without --protocol quick the same command chooses learning rates and trains from "
    "several seeds.",
    ONE_RATE: "Without --protocol quick the same command chooses one for each model.",
    ONE_SEED: "Several seeds, as in “copying*3”, allow a verdict.",
}


def write_report(
    results: Results,
    path: str | os.PathLike[str],
    budgets: Sequence[Budget] = (),
    *,
    refresh: int = 0,
) -> None:
    """Write the results as a page.

    The file is written atomically. The same results give the same bytes.

    Args:
        results: Results of one comparison, finished or not, or of several, merged.
        path: The file to write.
        budgets: Limits on the costs of models; the decision is among models within the limits.
        refresh: Seconds after which a browser reloads the page; 0 means never.

    Raises:
        InputError: If it cannot be written.
    """
    target = Path(path)
    check_writable(target)
    write_text(target, page(results, budgets, refresh=refresh))


def export_charts(results: Results, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the charts of a report as files, and return these.

    As images, also a slide of each task: its scores by length and by state, side by side.

    Args:
        results: What the report shows.
        folder: Where; files of the same names are replaced.
        formats: ``png``, ``svg``, ``csv`` (the data) or ``json`` (the Vega-Lite specification).

    Raises:
        InputError: If a file cannot be written.
    """
    found = sections(results)
    return write_charts(found.charts(), folder, formats, found.slides())


def page(results: Results, budgets: Sequence[Budget] = (), *, refresh: int = 0) -> str:
    """The results as a self-contained page."""
    found, judged = sections(results), answers(results, budgets)
    labels = {task.spec: task_label(results, task) for task in results.tasks}
    models, said = results.models, caution(results)
    folders = [source.folder or "." for source in results.origins()]
    widest = WIDEST_WITH_SPREADS if any(run.seed for run in results.runs) else WIDEST
    title = models[0] if len(models) == 1 else f"{len(models)} models compared"
    return render(
        "report.html",
        found.charts(),
        results=results,
        refresh=refresh,
        title=f"Stateline: {title}",
        headline=headline(results),
        unfinished=unfinished(results),
        caution=said,
        advice=ADVICE.get(said, ""),
        disturbed=disturbance(results),
        spent=spent(results),
        solvers=[
            (own.label, said)
            for own in judged.every
            if not own.beyond
            for said in [solvers(own)]
            if said
        ],
        beside=[*fastest_solvers(judged), *elsewhere(judged)],
        decisions=decisions(judged),
        pairs=_pairs(judged),
        headings=headings(results),
        chosen=CHOSEN,
        question=question(judged),
        budgets=budgets,
        alone=len(models) == 1,
        outlooks=[(labels[t.spec], said) for t in results.tasks for said in outlook(results, t)],
        conclusions=conclusions(judged),
        how_judged=_how_judged(results) if said in ("", ONE_RATE) and len(models) > 1 else "",
        look=drawn_models(results),
        legend=legend(results),
        main_tables=main_table(judged).split(widest),
        several_sizes=len(size_groups(results)) > 1,
        links={labels[task.spec]: task_name(results, task) for task in results.tasks},
        not_solved=NOT_SOLVED.text,
        off=f"more than {TOLERANCE:.0%} off the intended number of parameters",
        by_length=found.lengths,
        by_state=(by_state := found.by_state()),
        trade_offs=[chart for chart in found.trade_offs if chart not in by_state],
        tasks=[_task(judged, t, found.tasks[task_name(results, t)]) for t in results.tasks],
        keyword_charts=found.keywords,
        cost_charts=found.costs,
        machines=_machines(results),
        cost_table=cost_table(results),
        all_runs=all_runs_table(results),
        protocol=protocol(results),
        trials=trials_table(results),
        data=[(labels[task.spec], task.data) for task in results.tasks if task.data],
        export=shlex.join(["stateline", "report", *folders, "--export", "charts"]),
    )


def _how_judged(results: Results) -> str:
    several = looks(results) > 1
    rate = ERROR_RATE
    text = " and all looks while seeds were added" if several else ""
    return JUDGED.format(rate=rate, looks=text)


def _machines(results: Results) -> str:
    """Where the speeds were measured; empty if that is not recorded."""
    found = dict.fromkeys(
        f"{entry.machine} ({entry.device}, {entry.precision}, {count(entry.threads, 'thread')})"
        for entry in results.speed
        if entry.machine
    )
    return f"Speeds were measured on {listing(list(found))}." if found else ""


def legend(results: Results) -> list[Key]:
    """The models by architecture, as the legend shows them."""
    look = drawn_models(results)
    keys: dict[str, Key] = {}
    for model, family in families(results).items():
        key = keys.setdefault(family, Key(family, look[model], [family]))
        key.members.append(model)
    return list(keys.values())


def _pairs(judged: Answers) -> list[tuple[str, list[PairRow]]]:
    """The pairs of each decision, and how many of them are told apart."""
    found = []
    for answer in judged.decided():
        if rows := pair_rows(answer):
            told = f"{len(answer.verdict.better)} of {count(len(rows), 'pair')} told apart"
            found.append((f"{answer.label} at {answer.length:,}: {told}", rows))
    return found


def _task(judged: Answers, task: TaskRecord, charts: list[Chart]) -> dict[str, Any]:
    """The values for the template of a task's section."""
    results = judged.results
    solved = "" if task.solved_at is None else f", solved from {task.solved_at:g}"
    scored = f"Scored by {words(task.metric)}{solved}."
    models = [model for model in results.models if runs_of(results, model, task)]
    runs = itertools.chain.from_iterable(runs_of(results, model, task) for model in models)
    return {
        "record": task,
        "id": task_name(results, task),
        "label": task_label(results, task),
        "scoring": f"{scored} Trained at length {task.train_length}.",
        "baselines": baselines(task),
        "models": models,
        "charts": charts,
        "run_table": run_table(results, task),
        "length_table": length_table(judged, task),
        "training_table": training_table(results, task),
        "shared_settings": shared_settings(results, task),
        "samples": [run for run in runs if run.sample is not None],
    }
