"""A page that follows a comparison: written after its runs, and reloaded by the browser."""

import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from stateline.compare.news import News
from stateline.reports import read_results, write_report
from stateline.reports.budgets import Budget
from stateline.runs.job import Job
from stateline.runs.results import RunRecord

SECONDS = 10
"""Shortest time between two pages, and between two reloads in the browser."""


class Watched(News):
    """Writes the page of a comparison while its runs finish, and opens the first one."""

    def __init__(
        self, folder: Path, budgets: list[Budget], show: Callable[[str], object] = webbrowser.open
    ) -> None:
        self.folder, self.budgets, self.show = folder, budgets, show
        self.written = float("-inf")

    def finished(self, job: Job, run: RunRecord) -> None:  # noqa: ARG002
        """Write the page of the results so far, unless the last page is recent."""
        first, now = self.written == float("-inf"), time.monotonic()
        if job.trial or now - self.written < SECONDS:
            return
        page = (self.folder / "report.html").absolute()
        write_report(read_results(self.folder), page, self.budgets, refresh=SECONDS)
        self.written = now
        if first:
            self.show(page.as_uri())
