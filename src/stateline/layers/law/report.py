"""The result of a check: findings, and a table of them."""

from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one clause of the law."""

    clause: str
    error: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the clause holds."""
        return self.error <= self.limit


@dataclass(frozen=True)
class LawReport:
    """The results of a layer; ``str(report)`` is a table.

    Attributes:
        name: Name of the layer.
        findings: The result of every clause.
        diagnosis: What is wrong, in one sentence; empty if the law holds.
    """

    name: str
    findings: tuple[Finding, ...]
    diagnosis: str = ""

    @property
    def ok(self) -> bool:
        """Whether every clause holds."""
        return all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.clause) for finding in self.findings)
        said = f"THE LAW IS BROKEN: {self.diagnosis}" if self.diagnosis else "THE LAW IS BROKEN"
        lines = [f"{self.name}: {'the law holds' if self.ok else said}"]
        for clause, error, limit, note in self.findings:
            verdict = "ok    " if error <= limit else "BROKEN"
            lines.append(
                f"  {verdict}  {clause:<{width}}  {error:8.1e} of {limit:.0e}  {note}".rstrip()
            )
        return "\n".join(lines)
