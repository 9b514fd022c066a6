"""The results of runs for readers: a table in the terminal and a page for the browser."""

from typing import TYPE_CHECKING, Any

from stateline.reports.merge import folder_names, merge
from stateline.reports.terminal import print_results
from stateline.runs.folder import read_results

__all__ = [
    "export_charts",
    "folder_names",
    "merge",
    "print_results",
    "read_results",
    "write_report",
]

if TYPE_CHECKING:
    from stateline.reports.html import export_charts, write_report
else:

    def __getattr__(name: str) -> Any:
        """Import the parts that draw charts at their first use: it takes most of a second."""
        if name in {"export_charts", "write_report"}:
            from stateline.reports import html

            return getattr(html, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
