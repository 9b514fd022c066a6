"""The result of the check of a server: findings, the server's own noise, and one sentence."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class ServerFinding(NamedTuple):
    """The result of one way of asking.

    Attributes:
        clause: What was compared with the answer to a fresh prompt, alone.
        pairs: Number of comparisons.
        wrong: Number of comparisons whose difference is above the limit.
        worst: Largest difference: of log-probabilities in nats, or 1 for another text.
        where: The comparison with the largest difference.
        ok: Whether the clause holds.
    """

    clause: str
    pairs: int
    wrong: int
    worst: float
    where: str
    ok: bool


@dataclass(frozen=True)
class ServerReport:
    """The check of a server; ``str(report)`` is a table.

    Attributes:
        name: Address of the server, and its model.
        findings: One per clause that could be asked.
        noise: Median difference of all pairs: the server's own noise.
        limit: Largest difference that passes.
        effect: The control: how much another early token changes the answer.
        log_probs: Whether the server gives log-probabilities; otherwise texts are compared.
        isolates: Whether it takes requests that share no kept states; otherwise an answer counts
            as fresh if it is the first to its prompt.
        conclusive: Whether the effect is far above what passes.
        notes: What could not be asked.
    """

    name: str
    findings: tuple[ServerFinding, ...]
    noise: float
    limit: float
    effect: float
    log_probs: bool
    isolates: bool
    conclusive: bool
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every clause holds, and the check was conclusive."""
        return self.conclusive and all(finding.ok for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The verdict."""
        if not self.conclusive:
            return "NOTHING PROVED: the beginning of a prompt hardly changes the server's answers"
        wrong = [finding for finding in self.findings if not finding.ok]
        if not wrong:
            pairs = sum(finding.pairs for finding in self.findings)
            return f"the law holds: {pairs} answers are the same in every way of asking"
        first = max(wrong, key=lambda finding: finding.wrong / finding.pairs)
        by = f"by up to {first.worst:.2g} nats" if self.log_probs else "in their text"
        return (
            f"THE LAW IS BROKEN: {first.wrong} of {first.pairs} answers differ {by} "
            f"({first.clause}; worst: {first.where})"
        )

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        findings = [finding._asdict() for finding in self.findings]
        given = asdict(self) | {"findings": findings, "notes": list(self.notes)}
        return given | {"ok": self.ok, "sentence": self.sentence}

    def __str__(self) -> str:
        width = max(len(finding.clause) for finding in self.findings)
        lines = [f"{self.name}: {self.sentence}"]
        for clause, pairs, wrong, worst, where, ok in self.findings:
            verdict = "ok    " if ok else "BROKEN"
            lines.append(
                f"  {verdict}  {clause:<{width}}  {wrong:3} of {pairs:3} differ, "
                f"worst {worst:8.1e}  {'' if ok else where}".rstrip()
            )
        unit = "nats" if self.log_probs else "of the texts"
        lines.append(
            f"  own noise {self.noise:.1e} {unit}, limit {self.limit:.1e}; "
            f"control: another early token changes {self.effect:.1e}"
        )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
