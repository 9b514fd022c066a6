"""The result of a diagnosis: findings, and which calls are safe."""

from dataclasses import dataclass
from typing import NamedTuple

from stateline.hf_check.clauses import CALLS


class ModelFinding(NamedTuple):
    """The result of one clause.

    Attributes:
        mode: ``generate``: called with the arguments that ``generate`` prepares; ``plain``: with
            tokens, cache and mask alone; ``training``: as trainers call it, in packed rows.
        call: The kind of call that the clause is about: a key of ``CALLS``.
        clause: Name of the comparison.
        error: Relative error, or number of wrong tokens; ``None`` if the model does not offer it.
        limit: Largest error that passes.
        note: The exception, or why the model does not offer the call.
    """

    mode: str
    call: str
    clause: str
    error: float | None
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the clause holds, or is not offered."""
        return self.error is None or self.error <= self.limit


_MODES = {
    "generate": "as generate calls",
    "plain": "plain forward calls",
    "training": "as trainers call",
}


@dataclass(frozen=True)
class ModelReport:
    """The diagnosis of a model; ``str(report)`` is a table.

    Attributes:
        name: Name of the model.
        findings: One per clause and mode.
        effect: The control: how much other early tokens change later logits, relative.
        conclusive: Whether that effect is far above the limit.
    """

    name: str
    findings: tuple[ModelFinding, ...]
    effect: float
    conclusive: bool

    @property
    def ok(self) -> bool:
        """Whether every offered call is right, and the check was conclusive."""
        return self.conclusive and not self.wrong()

    @property
    def generate_ok(self) -> bool:
        """As ``ok``, but only for calls as ``generate`` makes them."""
        return self.conclusive and not any(found.mode == "generate" for found in self.wrong())

    def wrong(self) -> list[ModelFinding]:
        """The findings that break the law."""
        return [finding for finding in self.findings if not finding.ok]

    def calls(self, mode: str) -> dict[str, bool | None]:
        """For each kind of call in a mode: safe, not safe, or ``None`` if it is not offered."""
        verdict: dict[str, bool | None] = {}
        for call in CALLS:
            found = [f for f in self.findings if (f.mode, f.call) == (mode, call)]
            if found:
                offered = any(f.error is not None for f in found)
                verdict[call] = all(f.ok for f in found) if offered else None
        return verdict

    def __str__(self) -> str:
        width = max(len(finding.clause) for finding in self.findings)
        lines = [f"{self.name}: {self._headline()}"]
        for finding in self.findings:
            verdict = "n/a   " if finding.error is None else "ok    " if finding.ok else "WRONG "
            error = "-" if finding.error is None else f"{finding.error:.1e}"
            lines.append(
                f"  {verdict}  {finding.mode:<8}  {finding.clause:<{width}}  {error:>7}  "
                f"{finding.note}".rstrip()
            )
        lines.append(f"  control: other early tokens change later logits by {self.effect:.1e}")
        return "\n".join([*lines, *self._verdicts()])

    def _headline(self) -> str:
        if not self.conclusive:
            return "NOTHING PROVED: the past hardly matters in this model"
        return "every offered call is right" if self.ok else "SOME CALLS ARE WRONG"

    def _verdicts(self) -> list[str]:
        lines = []
        for mode, title in _MODES.items():
            verdict = self.calls(mode)
            for label, value in (("safe", True), ("NOT safe", False), ("not offered", None)):
                if named := [CALLS[call] for call, safe in verdict.items() if safe is value]:
                    lines.append(f"  {title}, {label}: {'; '.join(named)}")
        return lines
