"""The result of a check: findings, and a table of them."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one clause of the law; if it is broken, the note says what is wrong."""

    clause: str
    error: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the clause holds."""
        return self.error <= self.limit


def explained(clause: str, error: float, limit: float, causes: Iterator[str]) -> Finding:
    """A finding whose note, if it is broken, is the first cause; others are not looked for.

    If the search raises, as a broken layer may, the error is told without a cause.
    """
    finding = Finding(clause, error, limit)
    if not finding.ok:
        with suppress(Exception):
            return finding._replace(note=next(causes, ""))
    return finding


@dataclass(frozen=True)
class LawReport:
    """The results of a layer; ``str(report)`` is a table.

    Attributes:
        name: Name of the layer.
        findings: The result of every clause, causes before their consequences.
        tokens: Length of the longest sequence that was checked.
        diagnosis: What is wrong, in one sentence; empty if the law holds.
    """

    name: str
    findings: tuple[Finding, ...]
    tokens: int

    @property
    def ok(self) -> bool:
        """Whether every clause holds."""
        return all(finding.ok for finding in self.findings)

    @property
    def diagnosis(self) -> str:
        """The cause: the first clauses break the later ones."""
        for clause, error, limit, note in self.findings:
            if not error <= limit:
                return note.split("; ")[0] or f"{clause} does not hold: an error of {error:.0e}"
        return ""

    def __str__(self) -> str:
        width = max(len(finding.clause) for finding in self.findings)
        holds = f"the law holds up to {self.tokens} tokens"
        said = holds if self.ok else f"THE LAW IS BROKEN: {self.diagnosis}"
        lines = [f"{self.name}: {said}"]
        for clause, error, limit, note in self.findings:
            verdict = "ok    " if error <= limit else "BROKEN"
            lines.append(
                f"  {verdict}  {clause:<{width}}  {error:8.1e} of {limit:.0e}  {note}".rstrip()
            )
        return "\n".join(lines)
