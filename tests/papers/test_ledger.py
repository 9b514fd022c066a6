"""The tables of claims on the papers' pages: from recorded results, with commands that work."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from stateline.cli import COMMANDS, Parser, _underscored
from stateline.cli.reproduce import RECORDS
from stateline.cli.train import add_arguments, read_recipe
from stateline.errors import InputError
from stateline.papers.claim import judge, verdict
from stateline.papers.record import read_table
from stateline.papers.table import find_table

ROOT = Path(__file__).parents[2]


def _ledger() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ledger", ROOT / "docs" / "_ext" / "ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ledger = _ledger()


def commands() -> Iterator[str]:
    """Every single command of every claim."""
    for path in ledger.CLAIMS:
        for claim in ledger.read_claims(path):
            yield from filter(None, claim.commands.split("; "))


def test_the_pages_show_the_recorded_results_of_today() -> None:
    assert len(ledger.CLAIMS) == 4
    for page, text in ledger.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run make ledger"


def test_the_verdicts_that_changed_are_those_of_today() -> None:
    text = (ledger.PAGES / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (.+?) \| (.+?) \| (.+?) \| .+ \|$", text, re.MULTILINE)
    changed = [row for row in rows if (ledger.PAGES / f"{row[0]}.md").exists()]
    assert len(changed) == 10
    pages = {page.stem: page.read_text(encoding="utf-8") for page in ledger.pages()}
    for page, claim, before, now in changed:
        assert before != now
        assert f"| **{now}** | [{claim}](" in pages[page]
    measured = sum(len(re.findall(r"^\| \*\*", own, re.MULTILINE)) for own in pages.values())
    assert f"Ten of the {measured} measured verdicts" in text


def test_as_good_as_has_the_margin_of_the_paper() -> None:
    """H3's tables 2 and 9 say within one point, its table 19 half a point."""
    margins: dict[str, set[float]] = {}
    for own in chain.from_iterable(map(ledger.read_claims, ledger.CLAIMS)):
        margins.setdefault(own.table, set()).update(s.by for s in own.statements if s.by)
    for name in ("small", "longer", "converged", "other"):
        assert margins[f"h3/table_9_{name}"] == {-1.0}
    assert margins["h3/table_19"] == {-0.5}


def test_every_page_says_what_the_rate_is_for_all_its_claims_together() -> None:
    for text in ledger.pages().values():
        assert re.search(r"at 5% for all claims of the page together, \d+\.", text)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_of_a_claim_can_be_given(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, *arguments = shlex.split(command)
    if name == "pytest":
        file, _, test = arguments[0].partition("::")
        assert f"\ndef {test}(" in Path(file).read_text(encoding="utf-8")
        return
    if name in ("bash", "python"):
        assert Path(arguments[0]).is_file()
        return
    assert name == "stateline"
    command, arguments = arguments[0], [_underscored(a) for a in arguments[1:]]
    assert command in COMMANDS
    module = importlib.import_module(f"stateline.cli.{command}")
    parser = Parser(prog=command)
    module.add_arguments(parser)
    given = parser.parse_args(arguments)
    if command == "train":
        parser = Parser(prog=command)
        add_arguments(parser)
        assert read_recipe(arguments, parser).pattern
    if command == "reproduce":
        assert given.size in find_table(given.name, ROOT / "recipes")[1].sizes


@pytest.mark.parametrize("path", sorted((ROOT / RECORDS).rglob("*.json")), ids=lambda p: p.stem)
def test_a_recorded_table_says_when_where_and_how_it_was_made(path: Path) -> None:
    record = read_table(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.created)
    assert record.command
    assert record.environment["torch"]
    assert re.match(r"[0-9a-f]{40}", str(record.environment["commit"]))  # unknown sorts last
    assert record.rows
    assert record.table == "" or path == ROOT / RECORDS / f"{record.table}-{record.size}.json"


def test_every_recorded_table_is_shown() -> None:
    shown = set()
    for path in ledger.CLAIMS:
        for claim in ledger.read_claims(path):
            shown |= {claim.record or f"{claim.table}-{claim.size}", claim.beside}
    records = (ROOT / RECORDS).rglob("*.json")
    names = {path.relative_to(ROOT / RECORDS).with_suffix("").as_posix() for path in records}
    assert names <= shown


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("{statements: [{of: H3, above: 1}], why: x, table: h3/table_4}", "nothing is recorded"),
        ("{why: x, place: p, claim: c}", "one of statements"),
        ("{verdict: not run, test: t, why: x, place: p, claim: c}", "one of statements"),
        ("{verdict: reproduced, why: x, place: p, claim: c}", "Invalid enum value 'reproduced'"),
        ("{verdict: not run, place: p, claim: c}", "missing required field `why`"),
        ("{verdict: not run, why: x, claim: c}", "without a table needs place and claim"),
        (
            "{statements: [{of: Transformer, above: 1}], why: x, place: p, claim: c, "
            "record: h3/official_recall, command: make}",
            "has no figure of Transformer, score at 20 (%)",
        ),
        (
            "{statements: [{of: H3, above: 1}], why: x, place: p, claim: c, record: h3/table_12}",
            "figures need the command that gives them again",
        ),
        (
            "{statements: [{of: H3, above: 5}], why: x, table: h3/table_12, claim: It recalls 80.}",
            "the claim names 80, which is in no row, column or statement",
        ),
        (
            "{statements: [{of: H3, above: 50}], why: reproduced with 3 seeds, table: h3/table_12}",
            "verdicts are computed, but 'reproduced' is written in 'reproduced with 3 seeds'",
        ),
        ("{test: 'a.py::b', why: x, place: p, claim: c, lacks: [no power at 9]}", "'no power' is"),
    ],
)
def test_a_wrong_claim_is_refused(claim: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(f"- {claim}\n")
    with pytest.raises(InputError) as error:
        ledger.ledger(path)
    assert message in str(error.value)


def measured() -> list[Any]:
    found = [entry for path in ledger.CLAIMS for entry in ledger.entries(path)]
    return [entry for entry in found if entry.record is not None]


def test_a_wrong_sentence_is_not_reproduced() -> None:
    """Every statement that holds is turned round: its claim must be contradicted."""
    for entry in measured():
        for statement, judged in zip(entry.claim.statements, entry.judged, strict=True):
            if judged.outcome != "undecided":
                wrong = judge(statement.reversed, entry.record)
                assert {wrong.outcome, judged.outcome} == {"holds", "opposite"}
                said = verdict([wrong])
                assert said == ("contradicted" if judged.outcome == "holds" else "reproduced")


def test_one_seed_decides_nothing() -> None:
    for entry in measured():
        seeds = {row.name: len(row.seeds) for row in entry.record.rows}
        for own, judged in zip(entry.claim.statements, entry.judged, strict=True):
            if judged.outcome != "undecided":
                assert min(seeds[own.of], seeds.get(own.other, 2)) > 1


def test_other_code_stands_beside_ours() -> None:
    entry = next(own for own in measured() if own.claim.beside)
    rows = {row.name: row for row in entry.record.rows}
    assert {"H3, recall", "official code, here"} <= set(rows)
    beside = read_table(ROOT / RECORDS / f"{entry.claim.beside}.json").rows[0]
    assert rows[beside.name].values == beside.values[: len(entry.record.columns)]


def test_a_section_says_from_which_commits_its_figures_are() -> None:
    record = measured()[0].record
    commits = {"commit": f"{'a' * 40}, {'b' * 40}+"}
    told = ledger._commits(msgspec.structs.replace(record, environment=commits))
    assert told == "commit aaaaaaaaaa, bbbbbbbbbb with changed files"


def test_charts_of_claims_are_drawn() -> None:
    for entry in measured():
        if name := ledger._chart(entry):
            assert (ledger.PAGES / name).is_file(), "run make ledger"
            beside = ledger.PAGES / ledger._beside(name)
            assert beside.is_file() is (entry.claim.plot is not None), "run make ledger"


def test_the_paper_s_own_points_are_words_and_a_chart_of_their_own() -> None:
    plot = ledger.PaperPlot("state size", "perplexity", [(8, 11.95), (16, 11.57)])
    assert plot.words == "perplexity 11.95, 11.57 at 8, 16 (state size)"
    drawn = ledger._paper_chart(plot, "a figure")
    assert [(own["x"], own["y"]) for own in drawn.rows] == [(8, 11.95), (16, 11.57)]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# A page", "the page lacks"),
        (f"{ledger.BEGIN}{ledger.END} So table 2 is contradicted.", "'contradicted' is written"),
        (f"{ledger.BEGIN}{ledger.END} H3 has 98.97 ± 0.66.", "says 98.97 ± 0.66: no record does"),
    ],
)
def test_a_wrong_page_is_refused(page: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ledger.with_ledger(page, ledger.PAGES / "claims" / "h3.yaml")
