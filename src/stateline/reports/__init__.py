"""The results of runs for readers: a table in the terminal and a page for the browser."""

from stateline.reports.html import check_report, write_report
from stateline.reports.merge import folder_names, merge
from stateline.reports.terminal import print_results
from stateline.runs.folder import read_results

__all__ = [
    "check_report",
    "folder_names",
    "merge",
    "print_results",
    "read_results",
    "write_report",
]
