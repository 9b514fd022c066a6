"""The results of runs for people to read: one table in the terminal, one page in the browser."""

from stateline.reports.html import write_report
from stateline.reports.load import read_results
from stateline.reports.merge import folder_names, merge
from stateline.reports.terminal import print_results

__all__ = ["folder_names", "merge", "print_results", "read_results", "write_report"]
