"""Writes the claims into the pages of the papers, and draws their charts: ``make ledger``.

``docs/papers/claims/PAPER.yaml`` lists the claims of a paper as inequalities. Our figures come from
recorded tables (``benchmarks/papers``), which ``stateline reproduce NAME --record`` writes, and the
verdicts follow from them (:mod:`stateline.papers.claim`).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import yaml

from stateline.charts.chart import Axis, Chart
from stateline.charts.export import write_charts
from stateline.charts.lines import Line, Point, line_chart
from stateline.charts.style import styled
from stateline.cli.reproduce import RECORDS
from stateline.errors import InputError
from stateline.files import write_text
from stateline.papers.chart import draw, has_chart
from stateline.papers.claim import Judged, Statement, judge_all, rate_of, verdict
from stateline.papers.record import RecordedRow, TableRecord, read_table, with_rows
from stateline.papers.show import figure, number, seeds
from stateline.papers.table import Table, find_table
from stateline.runs.verdict import ERROR_RATE

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "papers"
CLAIMS = sorted((PAGES / "claims").glob("*.yaml"))

VERDICTS = (
    *("reproduced", "in part", "contradicted", "no power"),
    *("needs a GPU", "needs data", "not run"),
)

WRITTEN = re.compile(r"\b(reproduced|in part|contradict\w*|no power)\b", re.IGNORECASE)
"""A verdict that somebody wrote: no figure bears it out."""

MEASURED = re.compile(r"(?<![\d.,])([\d,]*\.?\d+) ± ([\d,]*\.?\d+)")
"""A mean and its deviation in a text."""

NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*(?<![,.])\b")

BEGIN, END = "<!-- claims: made by make ledger -->", "<!-- end of claims -->"

Unmeasured = Literal["needs a GPU", "needs data", "not run"]


class PaperPlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of the paper's plot, of a model of its own size: they get their own chart.

    Attributes:
        x: Title of the axis.
        y: What is measured.
        points: Places and values.
    """

    x: str
    y: str
    points: list[tuple[float, float]]

    @property
    def words(self) -> str:
        """The points in words."""
        places, values = (", ".join(map(number, own)) for own in zip(*self.points, strict=True))
        return f"{self.y} {values} at {places} ({self.x})"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim of a paper, or a part of its experiments.

    The verdict follows from ``statements`` on recorded figures, or from a ``test`` of what is
    exact. It is written only where nothing was measured.

    Attributes:
        why: Our setting and its limits, or why nothing was measured.
        verdict: Why there is no result.
        statements: The claim as inequalities between recorded figures, its headline first.
        lacks: Parts of the claim that the record or the test does not cover.
        looks: How often the statements were judged: seeds were added after all looks but the last.
        table: A table of ``stateline reproduce``; it gives what is not given here.
        place: Where in the paper.
        claim: What the paper says, in a sentence.
        paper: Its figures, if the record does not have them.
        plot: The points of its plot.
        sure: How sure we are of them.
        size: The size of the recorded result.
        command: How to measure it; by default that of the table.
        record: The recorded result, below ``benchmarks/papers``, without suffix; by default that of
            the table.
        beside: Another recorded result of the same training, such as that of official code, whose
            rows are shown with ours. Its first columns are ours, in our order.
        rows: Rows to show; by default all.
        columns: Columns to show; by default the first.
        guessing: By column, the score of a model that has learned nothing.
        test: A test that shows it, ``FILE::NAME``, where it is exact.
    """

    why: str
    verdict: Unmeasured | None = None
    statements: list[Statement] = []
    lacks: list[str] = []
    looks: Annotated[int, msgspec.Meta(ge=1)] = 1
    table: str = ""
    place: str = ""
    claim: str = ""
    paper: str = ""
    plot: PaperPlot | None = None
    sure: str = ""
    size: Literal["laptop", "paper", "-"] = "laptop"
    command: str = ""
    record: str = ""
    beside: str = ""
    rows: list[str] = []
    columns: list[str] = []
    guessing: dict[str, float] = {}
    test: str = ""

    def __post_init__(self) -> None:
        if not self.table and not (self.place and self.claim):
            raise ValueError("a claim without a table needs place and claim")
        if sum((self.verdict is not None, bool(self.statements), bool(self.test))) != 1:
            raise ValueError(
                "a claim has one of statements (on recorded figures), test (if it is exact) and "
                "verdict (if nothing was measured)"
            )
        if self.statements and not self.commands:
            raise ValueError("figures need the command that gives them again: add table or command")

    @property
    def commands(self) -> str:
        """The command, for a console; empty if there is none."""
        if self.command or self.test:
            return self.command or f"pytest {self.test} -m ''"
        size = " --size paper" if self.size == "paper" else ""
        return f"stateline reproduce {self.table}{size}" if self.table else ""


class Entry(NamedTuple):
    """A claim with what belongs to it.

    Attributes:
        claim: The claim.
        table: Its table of ``stateline reproduce``.
        record: Its recorded result.
        judged: Its statements with their outcomes.
    """

    claim: Claim
    table: Table | None
    record: TableRecord | None
    judged: list[Judged]

    @property
    def place(self) -> str:
        """Where in the paper."""
        return self.claim.place or (self.table.place if self.table else "")

    @property
    def words(self) -> str:
        """What the paper says."""
        return self.claim.claim or (self.table.claim if self.table else "")

    @property
    def verdict(self) -> str:
        """The verdict, computed unless nothing was measured."""
        claim = self.claim
        if claim.test:
            return "in part" if claim.lacks else "reproduced"
        return claim.verdict or verdict(self.judged, claim.lacks)


def read_claims(path: Path) -> list[Claim]:
    """The claims of a paper.

    Raises:
        InputError: If the file is damaged.
    """
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), list[Claim])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InputError(f"the claims {path}: {error}") from error


def entries(path: Path, records: Path = ROOT / RECORDS) -> list[Entry]:
    """The claims of a paper with their tables, records and outcomes.

    Raises:
        InputError: If a statement is on a result that is not recorded.
    """
    return [_entry(claim, records) for claim in read_claims(path)]


def _entry(claim: Claim, records: Path) -> Entry:
    for words in (claim.why, claim.claim, *claim.lacks):
        _refuse_written(words)
    table = find_table(claim.table, ROOT / "recipes")[1] if claim.table else None
    name = claim.record or (f"{claim.table}-{claim.size}" if claim.table else "")
    if not claim.statements:
        return Entry(claim, table, None, [])
    if not (records / f"{name}.json").exists():
        raise InputError(f"{claim.table or claim.place} has statements, but nothing is recorded")
    record = read_table(records / f"{name}.json")
    if claim.beside:
        record = _with_beside(record, read_table(records / f"{claim.beside}.json"))
    entry = Entry(claim, table, record, judge_all(claim.statements, record, claim.looks))
    _check_numbers(entry)
    return entry


def _with_beside(record: TableRecord, beside: TableRecord) -> TableRecord:
    """A record with the rows of another one, cut to its columns."""
    own = len(record.columns)
    rows = [
        msgspec.structs.replace(row, values=row.values[:own], paper=row.paper[:own])
        for row in beside.rows
    ]
    cut = msgspec.structs.replace(beside, columns=record.columns, rows=rows, solved=record.solved)
    return with_rows(record, cut)


def _check_numbers(entry: Entry) -> None:
    """Refuse a claim of lengths, sizes or figures that are neither measured nor named as lacking.

    Raises:
        InputError: If a number of its sentence is in no row, column, statement and lack.
    """
    claim, record = entry.claim, entry.record
    assert record is not None
    known = [*claim.lacks, *(claim.columns or record.columns[:1]), *(r.name for r in record.rows)]
    known += [number(n) for own in claim.statements for n in own.numbers]
    missing = {*NUMBER.findall(entry.words)} - {*NUMBER.findall(" ".join(known))}
    if missing:
        raise InputError(
            f"{entry.place}: the claim names {', '.join(sorted(missing))}, which is in no row, "
            "column or statement: measure it, or say under lacks what was measured instead"
        )


def _refuse_written(words: str) -> None:
    if found := WRITTEN.search(words):
        around = words[max(0, found.start() - 40) : found.end() + 40].replace("\n", " ")
        raise InputError(
            f"verdicts are computed, but {found[0]!r} is written in {around!r}: give figures"
        )


def _check_figures(prose: str, path: Path) -> None:
    """Refuse figures in a page's text that no record of its paper holds, to the digits shown.

    Raises:
        InputError: If there is one.
    """
    known = [
        spread
        for file in (ROOT / RECORDS / path.stem).glob("*.json")
        for row in read_table(file).rows
        for column in range(len(row.values))
        if (spread := row.spread(column)) is not None
    ]
    papers = {found for claim in read_claims(path) for found in MEASURED.findall(claim.paper)}
    for found in MEASURED.findall(prose):
        shown = [text.replace(",", "") for text in found]
        near = [0.501 * 10.0 ** -len(text.partition(".")[2]) for text in shown]
        if found not in papers and not any(
            all(abs(a - float(b)) <= c for a, b, c in zip(own, shown, near, strict=True))
            for own in known
        ):
            raise InputError(f"the page of {path.stem} says {' ± '.join(found)}: no record does")


def ledger(path: Path, records: Path = ROOT / RECORDS) -> str:
    """The claims of a paper in Markdown: measured by runs, exact by tests, and not measured.

    Raises:
        InputError: If a statement is on a result that is not recorded.
    """
    found = entries(path, records)
    counts = Counter(entry.verdict for entry in found)
    total = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    measured = [entry for entry in found if entry.record is not None]
    sizes = " and ".join(dict.fromkeys(own.claim.size for own in measured))
    overview = [
        (f"**{own.verdict}**", f"[{own.place}](#{_slug(own)}): {own.words}", own.judged[0].words)
        for own in measured
    ]
    return "\n\n".join(
        [
            f"{len(found)} claims: {total} ([what the verdicts mean](index.md#verdicts)). "
            f"{_joint(measured)} The measured ones, at {sizes} size:",
            _grid(("verdict", "claim", "its headline, in our figures"), overview),
            *map(_section, measured),
            *_rows("Exact, by tests", [entry for entry in found if entry.claim.test]),
            *_rows("Not measured", [entry for entry in found if entry.claim.verdict]),
        ]
    )


def _joint(measured: Sequence[Entry]) -> str:
    """How many headlines the rate of each claim decides, and one rate for all claims."""
    rates = [rate_of(own.claim.statements, own.claim.looks) for own in measured]
    pairs = [(own.judged[0], rate) for own, rate in zip(measured, rates, strict=True)]
    alone = sum(head.outcome != "undecided" for head, _ in pairs)
    joint = sum(h.outcome != "undecided" and h.chance < r / len(pairs) for h, r in pairs)
    return (
        f"At {ERROR_RATE:.0%} for each claim, {alone} of {len(pairs)} headlines are decided; at "
        f"{ERROR_RATE:.0%} for all claims of the page together, {joint}."
    )


def _section(entry: Entry) -> str:
    """A claim that was measured by runs: the sentence, figures, and what is folded."""
    claim, record = entry.claim, entry.record
    assert record is not None
    shown = [row for row in record.rows if not claim.rows or row.name in claim.rows]
    lines = [
        f"### {_title(entry)}",
        entry.words,
        _figures(claim, record, shown),
        _given(entry, shown),
        "\n".join(f"- {own.outcome}: {own.words}." for own in entry.judged),
        f"Not measured: {'; '.join(claim.lacks)}." if claim.lacks else "",
    ]
    if (name := _chart(entry)) and (PAGES / name).exists():
        lines += [f"![{_capital(entry.place)}: our figures]({name})"]
        if claim.plot:
            lines += [f"![{_capital(entry.place)}: the paper's figures]({_beside(name)})"]
    chances = ", ".join(f"{own.chance:.2g}" for own in entry.judged)
    counted = _capital(seeds(shown, record.unit))
    how = (
        f"{counted}, {claim.size} size, {record.created}, {_commits(record)}. "
        f"Chance of each difference between equal models: {chances} (decided below "
        f"{rate_of(claim.statements, claim.looks):.2g})."
    )
    commands = f"```console\n{_lines(claim.commands)}\n```" if claim.commands else ""
    folded = _folded("How it was measured", f"{_capital(claim.why)}.", how, record.note, commands)
    return "\n\n".join([*filter(None, lines), folded])


def _title(entry: Entry) -> str:
    return f"{_capital(entry.place)}: {entry.verdict}"


def _slug(entry: Entry) -> str:
    """The anchor of a claim's heading."""
    return re.sub(r"[^\w -]", "", _title(entry).lower()).replace(" ", "-")


def _commits(record: TableRecord) -> str:
    """The commits of the runs in words, and whether files differed from them."""
    commits = str(record.environment["commit"]).split(", ")
    told = [f"{own[:10]} with changed files" if own.endswith("+") else own[:10] for own in commits]
    return f"commit {', '.join(told)}"


def _rows(title: str, found: Sequence[Entry]) -> list[str]:
    """A table of claims without runs, and their commands."""
    if not found:
        return []
    rows = []
    for entry in found:
        here = "; ".join(filter(None, (entry.claim.why, *entry.claim.lacks)))
        figures = entry.claim.paper or _paper(entry)
        told = f" In the paper: {figures}." if figures else ""
        rows.append(
            (f"{_capital(entry.place)}: {entry.words}{told}", f"**{entry.verdict}**: {here}")
        )
    commands = "\n".join(
        f"# {entry.place}\n{_lines(entry.claim.commands)}"
        for entry in found
        if entry.claim.commands
    )
    grid = _grid(("claim", "here"), rows)
    return [f"### {title}", grid, _folded("Commands", f"```console\n{commands}\n```")]


def _folded(title: str, *parts: str) -> str:
    inner = filter(None, parts)
    return "\n\n".join([f"<details><summary>{title}</summary>", *inner, "</details>"])


def _lines(commands: str) -> str:
    return commands.replace("; ", "\n")


def _figures(claim: Claim, record: TableRecord, rows: Sequence[RecordedRow]) -> str:
    """Our figures by row and column, the paper's in brackets."""
    columns = [record.columns.index(name) for name in claim.columns or record.columns[:1]]
    headings = [record.columns[column] for column in columns]
    lines = [(row.name, *(_cell(record, row, n) for n in columns)) for row in rows]
    if claim.guessing:
        floor = [claim.guessing.get(heading) for heading in headings]
        lines.append(("guessing", *("" if own is None else number(own) for own in floor)))
    return _grid(("", *headings), lines)


def _cell(record: TableRecord, row: RecordedRow, column: int) -> str:
    """Our figure, and the paper's in brackets."""
    ours = figure(record, row, column)
    paper = row.paper[column] if column < len(row.paper) else None
    return ours if paper is None else f"{ours} ({number(paper)})"


def _given(entry: Entry, shown: Sequence[RecordedRow]) -> str:
    """The paper's figures in a sentence, or what the brackets hold."""
    sure = entry.claim.sure or (entry.table.sure if entry.table else "")
    plot = entry.claim.plot
    if told := entry.claim.paper or (plot.words if plot else ""):
        return f"The paper: {told} ({sure})."
    known = any(figure is not None for row in shown for figure in row.paper)
    return f"In brackets: the paper ({sure})." if known else ""


def _paper(entry: Entry) -> str:
    """The paper's figures in a table that was not run, row by row."""
    if entry.table is None or entry.claim.size == "-":
        return ""
    table, sizes = entry.table, ("paper", "laptop")
    rows = [row for size in sizes if size in table.sizes for row in table.rows_of(size)]
    given = {row.name: row.paper for row in rows if any(f is not None for f in row.paper)}
    return "; ".join(
        f"{name}: " + ", ".join("-" if f is None else number(f) for f in figures)
        for name, figures in given.items()
    )


def _chart(entry: Entry) -> str:
    """Where the chart of a claim lies, below the pages; empty if its table is not drawn."""
    table, claim = entry.table, entry.claim
    drawn = table is not None and entry.record is not None and has_chart(table, entry.record)
    return f"charts/{claim.table.replace('/', '-')}.svg" if drawn and not claim.record else ""


def _beside(name: str) -> str:
    """Where the chart of the paper's own points lies."""
    return name.replace(".svg", "-paper.svg")


def _paper_chart(plot: PaperPlot, title: str) -> Chart:
    """The paper's own points: its models, data and scores are not ours."""
    (model,) = styled(["the paper"])
    line = Line(model, [Point(x, [y]) for x, y in plot.points])
    return line_chart("", title, [], [line], (Axis(plot.x), Axis(plot.y)))


def draw_charts() -> None:
    """Draw the charts of all claims again."""
    for path in CLAIMS:
        for entry in entries(path):
            if (name := _chart(entry)) and entry.record and entry.table:
                first = draw(entry.table, entry.record)[0]
                file = PAGES / name
                write_charts([first._replace(name=file.stem)], file.parent, ["svg"])
                if entry.claim.plot:
                    theirs = _paper_chart(entry.claim.plot, f"{entry.table.paper}, {entry.place}")
                    name = Path(_beside(file.name)).stem
                    write_charts([theirs._replace(name=name)], file.parent, ["svg"])


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def with_ledger(page: str, path: Path) -> str:
    """The page of a paper with its claims of today between its marks.

    Raises:
        InputError: If the page has no such marks, a verdict is written outside them, or a figure
            that is not recorded.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"the page lacks {BEGIN} and {END}")
    _refuse_written(before + after)
    _check_figures(before + after, path)
    return f"{before}{BEGIN}\n\n{ledger(path)}\n\n{END}{after}"


def pages() -> Mapping[Path, str]:
    """Every page with its claims of today."""
    found = {path: PAGES / f"{path.stem}.md" for path in CLAIMS}
    return {p: with_ledger(p.read_text(encoding="utf-8"), path) for path, p in found.items()}


if __name__ == "__main__":
    draw_charts()
    for page, text in pages().items():
        write_text(page, text)
