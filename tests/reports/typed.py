"""What reports make of results that tests build, and change, as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from stateline import reports
from stateline.reports import html, sentences, summary
from stateline.runs.results import Results, convert

Plain = Mapping[str, Any]


def typed(results: Plain) -> Results:
    return convert(results, Results)


def with_task(results: Plain, task: Plain) -> tuple[Results, Any]:
    """Typed results, and their task with the spec of a plain one."""
    found = typed(results)
    return found, next(one for one in found.tasks if one.spec == task["spec"])


def page_of(results: Plain) -> str:
    return html.page(typed(results))


def write_report(results: Plain, path: Path) -> None:
    reports.write_report(typed(results), path)


def print_results(results: Plain, console: Console) -> None:
    reports.print_results(typed(results), console)


def merge(results: Mapping[str, Plain]) -> Results:
    return reports.merge({name: typed(one) for name, one in results.items()})


def main_table(results: Plain) -> summary.Table:
    return summary.main_table(typed(results))


def cost_table(results: Plain) -> summary.Table:
    return summary.cost_table(typed(results))


def length_table(results: Plain, task: Plain) -> summary.Table:
    return summary.length_table(*with_task(results, task))


def run_table(results: Plain, task: Plain) -> summary.Table:
    return summary.run_table(*with_task(results, task))


def headline(results: Plain) -> str:
    return sentences.headline(typed(results))


def unfinished(results: Plain) -> str:
    return sentences.unfinished(typed(results))


def verdict(results: Plain, task: Plain) -> str:
    return sentences.verdict(*with_task(results, task))
