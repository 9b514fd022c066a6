"""What reports make of results that tests build, and change, as plain data."""

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from stateline import reports
from stateline.reports import conclusions, html, page, sentences, summary
from stateline.reports.answers import answers
from stateline.runs.results import Results, convert

Plain = Mapping[str, Any]


def typed(results: Plain | Results) -> Results:
    return results if isinstance(results, Results) else convert(results, Results)


def with_task(results: Plain, task: Plain) -> tuple[Results, Any]:
    """Typed results, and their task with the spec of a plain one."""
    found = typed(results)
    return found, next(one for one in found.tasks if one.spec == task["spec"])


def page_of(results: Plain | Results, *, pictures: bool = False) -> str:
    """The page of results; without pictures and the script of Vega it is made in no time."""
    if pictures:
        return html.page(typed(results))
    empty: dict[str, Any] = {
        "pictures": lambda specs: ["<svg></svg>" for _ in specs],
        "bundle": lambda: "/* Vega */",
    }
    with patch.multiple(page, **empty):
        return html.page(typed(results))


def write_report(results: Plain, path: Path) -> None:
    reports.write_report(typed(results), path)


def printed(results: Plain | Results, width: int = 100) -> str:
    file = StringIO()
    reports.print_results(typed(results), Console(file=file, width=width, color_system=None))
    return file.getvalue()


def merge(results: Mapping[str, Plain]) -> Results:
    return reports.merge({name: typed(one) for name, one in results.items()})


def main_table(results: Plain) -> summary.Table:
    return summary.main_table(answers(typed(results)))


def cost_table(results: Plain) -> summary.Table:
    return summary.cost_table(typed(results))


def length_table(results: Plain, task: Plain) -> summary.Table:
    found, own = with_task(results, task)
    return summary.length_table(answers(found), own)


def run_table(results: Plain, task: Plain) -> summary.Table:
    return summary.run_table(*with_task(results, task))


def headline(results: Plain) -> str:
    return sentences.headline(typed(results))


def unfinished(results: Plain) -> str:
    return sentences.unfinished(typed(results))


def caution(results: Plain) -> str:
    return sentences.caution(typed(results))


def concluded(results: Plain, task: Plain) -> list[str]:
    found, own = with_task(results, task)
    return conclusions.task_conclusion(answers(found), own)


def costs_concluded(results: Plain) -> list[str]:
    return conclusions.cost_conclusion(typed(results))
