"""Verdicts on claims follow from the recorded figures."""

import msgspec
import pytest

from stateline.errors import InputError
from stateline.papers.claim import Judged, Outcome, Statement, judge, judge_all, verdict
from stateline.papers.record import RecordedRow, TableRecord

SEEDS = {
    "good": [[98.0, 98.4, 98.2], [300.0, 300.0, 400.0]],
    "bad": [[61.0, 63.0, 60.0], [1200.0, 900.0, None]],
    "wide": [[99.0, 40.0, 61.0], [900.0, None, None]],
    "once": [[99.0], [100.0]],
    "never": [[50.0, 49.0, 51.0], [None, None, None]],
    "steady": [[97.0, 97.0, 97.0], [200.0, 300.0, 200.0]],
    "lost": [[None, None, None], [200.0, 300.0, 200.0]],
}


def record() -> TableRecord:
    return TableRecord(
        table="",
        size="laptop",
        command="stateline",
        created="2026-11-23",
        environment={},
        columns=["score (%)", "updates to 0.9"],
        rows=[
            RecordedRow(label=name, seeds=[*range(len(values[0]))], values=values, updates=2000)
            for name, values in SEEDS.items()
        ],
    )


def outcome(**statement: object) -> Outcome:
    return judge(msgspec.convert(statement, Statement), record()).outcome


UPDATES = "updates to 0.9"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ({"of": "good", "above": "bad"}, "holds"),
        ({"of": "good", "below": "bad"}, "opposite"),
        ({"of": "good", "above": "bad", "by": 30.0}, "holds"),
        ({"of": "good", "above": "bad", "by": 36.7}, "undecided"),
        ({"of": "good", "above": "bad", "times": 2.0}, "opposite"),
        ({"of": "good", "above": "bad", "times": 0.5, "by": 80.0}, "opposite"),
        ({"of": "good", "above": "wide"}, "undecided"),
        ({"of": "lost", "above": "bad"}, "undecided"),
        ({"of": "once", "above": "bad"}, "undecided"),
        ({"of": "bad", "below": "once"}, "undecided"),
        ({"of": "good", "above": 97.0}, "holds"),
        ({"of": "good", "above": 99.5}, "opposite"),
        ({"of": "good", "above": 98.3}, "undecided"),
        ({"of": "once", "above": 50.0}, "undecided"),
        ({"of": "steady", "above": 96.5}, "holds"),
        ({"of": "steady", "above": 97.0}, "undecided"),
        # Missing figures count with all updates of the run, as a lower bound.
        ({"of": "never", "above": "good", "column": UPDATES}, "holds"),
        ({"of": "good", "above": "never", "column": UPDATES}, "opposite"),
        ({"of": "bad", "above": "good", "column": UPDATES}, "undecided"),
        ({"of": "never", "below": 2500.0, "column": UPDATES}, "undecided"),
        # Two columns of a row are compared seed by seed.
        ({"of": "good", "above": "good", "column": UPDATES, "against": "score (%)"}, "holds"),
    ],
)
def test_a_statement_is_decided_by_its_seeds(
    statement: dict[str, object], expected: Outcome
) -> None:
    assert outcome(**statement) == expected


@pytest.mark.parametrize("row", ["once", "lost"])
def test_where_nothing_is_known_the_chance_is_one(row: str) -> None:
    assert judge(Statement(of=row, above="bad"), record()).chance == 1.0


@pytest.mark.parametrize(
    ("solved", "statement", "expected"),
    [
        ([10, 0], {"of": "a", "above": "b"}, "holds"),
        ([0, 10], {"of": "a", "above": "b"}, "opposite"),
        ([3, 0], {"of": "a", "above": "b"}, "undecided"),
        ([2, 0], {"of": "a", "above": 0.5}, "undecided"),
        ([1, 0], {"of": "a", "above": 0.5}, "opposite"),
        ([10, 0], {"of": "a", "above": 0.5}, "holds"),
    ],
)
def test_shares_of_seeds_that_solve_are_compared(
    solved: list[int], statement: dict[str, object], expected: Outcome
) -> None:
    rows = [
        RecordedRow(label=name, seeds=[*range(10)], values=[[97.0] * n + [60.0] * (10 - n)])
        for name, n in zip("ab", solved, strict=True)
    ]
    ten = msgspec.structs.replace(record(), columns=["score"], rows=rows, solved={"score": 97.0})
    said = msgspec.convert({**statement, "share": True}, Statement)
    judged = judge(said, ten)
    assert judged.outcome == expected
    assert f"a ({solved[0]} of 10 seeds" in judged.words
    with pytest.raises(InputError, match="does not say from which score a seed has solved"):
        judge(said, msgspec.structs.replace(ten, solved={}))


def test_of_errors_a_seed_solves_with_at_most_the_goal() -> None:
    rows = [RecordedRow(label="a", seeds=[0, 1, 2], values=[[1.0, 5.0, None]])]
    errors = msgspec.structs.replace(
        record(), columns=["% wrong"], rows=rows, solved={"% wrong": 3.0}, lower=["% wrong"]
    )
    judged = judge(Statement(of="a", above=0.5, share=True), errors)
    assert "a (1 of 3 seeds" in judged.words


def test_looks_share_the_rate() -> None:
    """A chance of 3 % decides nothing if three seeds had been judged before."""
    row = RecordedRow(label="m", seeds=[0, 1, 2], values=[[1.0, 1.2, 1.45]], updates=1)
    one = msgspec.structs.replace(record(), columns=["a"], rows=[row])
    said = Statement(of="m", above=0.6)
    assert [judge_all([said], one, looks)[0].outcome for looks in (1, 2)] == ["holds", "undecided"]


def test_figures_of_one_row_are_paired() -> None:
    """Losses of 1 to 1.2 in every seed are clear, although seeds differ by tens."""
    row = RecordedRow(
        label="m", seeds=[0, 1, 2], values=[[10.0, 50.0, 90.0], [11.0, 51.2, 91.1]], updates=1
    )
    pair = msgspec.structs.replace(record(), columns=["short", "long"], rows=[row])
    said = Statement(of="m", above="m", column="long", against="short")
    assert judge(said, pair).outcome == "holds"
    assert judge(said.reversed, pair).outcome == "opposite"


def test_the_text_of_a_verdict_gives_both_figures() -> None:
    said = Statement(of="good", above="bad", times=1.5, by=2.0)
    assert judge(said, record()).words == (
        "score (%): good (98.20 ± 0.20) above 1.5 x bad (61.3 ± 1.5) + 2"
    )


def test_the_rate_is_shared_among_statements() -> None:
    """Of two figures whose chance is 3 %, one alone decides, one of two does not."""
    row = RecordedRow(label="m", seeds=[0, 1, 2], values=[[1.0, 1.2, 1.45]], updates=1)
    one = msgspec.structs.replace(record(), columns=["a"], rows=[row])
    said = Statement(of="m", above=0.6)
    (alone,) = judge_all([said], one)
    assert 0.025 < alone.chance < 0.05
    assert alone.outcome == "holds"
    assert {own.outcome for own in judge_all([said, said], one)} == {"undecided"}


@pytest.mark.parametrize(
    ("outcomes", "lacks", "expected"),
    [
        (["holds", "holds"], [], "reproduced"),
        (["holds", "holds"], ["longer strings"], "in part"),
        (["holds", "undecided"], [], "in part"),
        (["holds", "opposite"], [], "in part"),
        (["opposite", "holds"], [], "contradicted"),
        (["undecided", "opposite"], [], "contradicted"),
        (["undecided", "holds"], [], "no power"),
        (["undecided", "holds", "opposite"], [], "no power"),
        (["undecided", "undecided"], [], "no power"),
    ],
)
def test_the_verdict_follows_from_the_outcomes(
    outcomes: list[Outcome], lacks: list[str], expected: str
) -> None:
    assert verdict([Judged("", own, 0.0) for own in outcomes], lacks) == expected


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ({"of": "good"}, "one of above and below"),
        ({"of": "good", "above": 1.0, "below": 2.0}, "one of above and below"),
        ({"of": "good", "above": "good"}, "only in another column"),
        ({"of": "good", "above": "bad", "share": True, "by": 0.1}, "compared as they are"),
        ({"of": "good", "above": 50.0, "times": 2.0}, "for another row, not for a number"),
        ({"of": "good", "above": 50.0, "against": UPDATES}, "for another row, not for a number"),
    ],
)
def test_a_statement_without_sense_is_refused(statement: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(statement, Statement)


def test_a_statement_needs_recorded_figures() -> None:
    with pytest.raises(InputError, match=r"no figure of best, score \(%\)"):
        judge(Statement(of="best", above=1.0), record())
    with pytest.raises(InputError, match="no figure of good, loss"):
        judge(Statement(of="good", above=1.0, column="loss"), record())


def test_answers_to_examples_are_judged_by_their_shares() -> None:
    """The binomial test, and the words of examples in place of seeds."""
    rows = [
        RecordedRow(label=name, seeds=[*range(20)], values=[[100.0] * n + [0.0] * (20 - n)])
        for name, n in {"much": 19, "half": 11, "none": 0}.items()
    ]
    answered = msgspec.structs.replace(
        record(), columns=["answers"], rows=rows, solved={"answers": 100.0}, unit="examples"
    )

    def told(**statement: object) -> Judged:
        return judge(msgspec.convert({**statement, "share": True}, Statement), answered)

    assert told(of="much", above=0.5).outcome == told(of="much", above="none").outcome == "holds"
    assert told(of="half", above=0.5).outcome == "undecided"
    words = "share of exact answers, answers: none (0 of 20 examples (0 to 17 %)) above 0.5"
    assert told(of="none", above=0.5).words == words
