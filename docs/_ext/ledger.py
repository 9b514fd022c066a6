"""Writes the tables of claims into the pages of the papers: ``make ledger``.

``docs/papers/claims/PAPER.yaml`` lists the claims of a paper with our verdicts. Our figures come
from recorded tables (``benchmarks/papers``), which ``stateline reproduce NAME --record`` writes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from stateline.cli.reproduce import RECORDS
from stateline.errors import InputError
from stateline.files import write_text
from stateline.papers.record import TableRecord, read_table
from stateline.papers.show import cell, number, seeds
from stateline.papers.table import Table, find_table

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "papers"
CLAIMS = sorted((PAGES / "claims").glob("*.yaml"))

BEGIN, END = "<!-- claims: made by make ledger -->", "<!-- end of claims -->"

HEAD = ("place", "claim", "the paper", "here", "size", "verdict", "command")

Verdict = Literal["reproduced", "in part", "contradicted", "needs a GPU", "needs data", "not run"]

MEASURED = ("reproduced", "in part", "contradicted")
"""Verdicts that need a recorded result, or a test for what is exact."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim of a paper, or a part of its experiments, and our verdict.

    Attributes:
        verdict: Our verdict.
        why: The reason for it.
        table: A table of ``stateline reproduce``; it gives what is not given here.
        place: Where in the paper.
        claim: What the paper says, in a sentence.
        paper: Its figures.
        sure: How sure we are of them.
        size: The size of the recorded result.
        command: How to measure it; by default that of the table.
        record: The recorded result, below ``benchmarks/papers``, without suffix; by default that of
            the table.
        show: Our figures: pairs of a row's name and a column's heading; by default all rows in the
            first column.
        test: A test that shows it, ``FILE::NAME``, where it is exact.
    """

    verdict: Verdict
    why: str
    table: str = ""
    place: str = ""
    claim: str = ""
    paper: str = ""
    sure: str = ""
    size: Literal["laptop", "paper", "-"] = "laptop"
    command: str = ""
    record: str = ""
    show: list[tuple[str, str]] = []
    test: str = ""

    def __post_init__(self) -> None:
        if not self.table and not (self.place and self.claim):
            raise ValueError("a claim without a table needs place and claim")

    @property
    def commands(self) -> str:
        """The command, for a console; empty if there is none."""
        if self.command or self.test:
            return self.command or f"pytest {self.test} -m ''"
        size = " --size paper" if self.size == "paper" else ""
        return f"stateline reproduce {self.table}{size}" if self.table else ""


def read_claims(path: Path) -> list[Claim]:
    """The claims of a paper.

    Raises:
        InputError: If the file is damaged.
    """
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), list[Claim])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InputError(f"the claims {path}: {error}") from error


def ledger(path: Path, records: Path = ROOT / RECORDS) -> str:
    """The table of a paper's claims in Markdown.

    Raises:
        InputError: If a claim has a verdict on a result that is not recorded.
    """
    rows = [_row(claim, records) for claim in read_claims(path)]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )


def _row(claim: Claim, records: Path) -> tuple[str, ...]:
    table = find_table(claim.table, ROOT / "recipes")[1] if claim.table else None
    record = _record(claim, records)
    if claim.verdict in MEASURED and record is None and not claim.test:
        raise InputError(f"{claim.table or claim.place}: {claim.verdict}, but nothing is recorded")
    figures, sure = (
        claim.paper or _figures(table, claim),
        claim.sure or (table.sure if table else ""),
    )
    return (
        claim.place or (table.place if table else ""),
        claim.claim or (table.claim if table else ""),
        f"{figures} ({sure})" if figures else "",
        _here(record, claim) if record else ("exact, by a test" if claim.test else ""),
        claim.size if claim.commands or claim.record else "",
        f"**{claim.verdict}**: {claim.why}",
        f"`{claim.commands}`" if claim.commands else "",
    )


def _record(claim: Claim, records: Path) -> TableRecord | None:
    name = claim.record or (f"{claim.table}-{claim.size}" if claim.table else "")
    path = records / f"{name}.json"
    return read_table(path) if name and (claim.record or path.exists()) else None


def _figures(table: Table | None, claim: Claim) -> str:
    """The paper's figures in a table, row by row."""
    if table is None or claim.size == "-":
        return ""
    rows = [
        row for size in ("paper", "laptop") if size in table.sizes for row in table.rows_of(size)
    ]
    given = {row.name: row.paper for row in rows if any(f is not None for f in row.paper)}
    return "; ".join(
        f"{name}: " + ", ".join("-" if f is None else number(f) for f in figures)
        for name, figures in given.items()
    )


def _here(record: TableRecord, claim: Claim) -> str:
    """Our figures, by column."""
    rows = {row.name: row for row in record.rows}
    shown = claim.show or [(name, record.columns[0]) for name in rows]
    by_column: dict[str, list[str]] = {}
    for name, heading in shown:
        if name not in rows or heading not in record.columns:
            raise InputError(f"{record.table or claim.record} has no figure of {name}, {heading}")
        figure = cell(rows[name], record.columns.index(heading))
        by_column.setdefault(heading, []).append(f"{name} {figure}")
    figures = "; ".join(f"{heading}: {', '.join(own)}" for heading, own in by_column.items())
    return f"{figures} ({seeds([rows[name] for name, _ in shown])}, {record.created})"


def with_ledger(page: str, table: str) -> str:
    """A page with the table between its marks.

    Raises:
        InputError: If the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def pages() -> Mapping[Path, str]:
    """Every page with its table of today."""
    found: dict[Path, Any] = {}
    for path in CLAIMS:
        page = PAGES / f"{path.stem}.md"
        found[page] = with_ledger(page.read_text(encoding="utf-8"), ledger(path))
    return found


if __name__ == "__main__":
    for page, text in pages().items():
        write_text(page, text)
