"""A comparison for people to read: one table in the terminal, one page in the browser."""

from stateline.reports.html import write_report
from stateline.reports.terminal import print_results

__all__ = ["print_results", "write_report"]
