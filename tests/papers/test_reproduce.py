"""``stateline reproduce`` from end to end, on tables of seconds."""

import csv
import json
from pathlib import Path

import msgspec
import pytest

from stateline.cli import main
from stateline.cli.reproduce import RECORDS
from stateline.files import sole_writer
from stateline.papers.record import RecordedRow, TableRecord, read_table, write_table
from stateline.papers.verify import verify
from stateline.reports import read_results

TASK = "copying(n_letters=3, min_len=2, max_len=3, context_len=12, batch_size=2, longest=6)"

TABLE = f"""\
paper: Nobody (2026)
place: table 1
claim: Tiny models learn nothing.
columns:
  - {{at: 3, form: percent}}
  - {{updates_to: 1.0}}
  - {{count: parameters}}
rows:
  - {{label: H3, pattern: h3(d_state=4), paper: [99.8]}}
  - {{label: LSTM, pattern: lstm, model: {{d_model: 4}}}}
sizes:
  laptop:
    cost: seconds
    task: "{TASK}"
    model: {{d_model: 8}}
    train: {{steps: 2, eval_every: 1}}
plot: updates
"""

TRAIN = ["--task", TASK, "--train.steps", "2", "--train.eval_every", "1", "--model.d_model", "8"]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a tiny table among recipes, as the current one."""
    monkeypatch.chdir(tmp_path)
    Path("recipes/nobody/tables").mkdir(parents=True)
    Path("recipes/nobody/tables/one.yaml").write_text(TABLE)


def reproduce(*more: str) -> int:
    options = ["--workers", "0", "--device", "cpu", "--seeds", "0", "1"]
    return main(["reproduce", "nobody/one", "--recipes", "recipes", *options, *more])


def recorded() -> TableRecord:
    return read_table(Path("runs/papers/nobody/one/laptop/table.json"))


def test_a_table_is_run_once_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--record") == 0
    shown, first = capsys.readouterr().out, recorded()
    assert "4 runs\n" in shown
    assert "Nobody (2026), table 1: Tiny models learn nothing." in shown
    assert [(row.label, row.seeds) for row in first.rows] == [("H3", [0, 1]), ("LSTM", [0, 1])]
    assert first.command == "stateline reproduce nobody/one --size laptop --seeds 0 1"
    assert first.rows[0].paper == [99.8, None, None]
    assert first.rows[0].spread(1) is None  # 100 % was not reached
    results = read_results(Path("runs/papers/nobody/one/laptop"))
    scores = [run.by_length[3]["string_accuracy"] for run in results.runs[:2]]
    assert first.rows[0].values[0] == [100 * (score or 0.0) for score in scores]
    assert first.rows[0].values[2] == [results.runs[0].parameters] * 2
    assert results.runs[0].parameters != results.runs[2].parameters
    with open("runs/papers/nobody/one/laptop/chart.csv", encoding="utf-8") as file:
        assert [(r["model"], r["x"]) for r in csv.DictReader(file)] == [
            (model, x) for model in ("H3", "LSTM") for x in ("1", "2")
        ]
    assert Path("runs/papers/nobody/one/laptop/report.html").exists()
    assert read_table(RECORDS / "nobody/one-laptop.json") == first

    begun = {path: path.stat().st_mtime_ns for path in Path("runs/papers/runs").rglob("*.*")}
    assert reproduce() == 0
    assert "4 runs, 4 of them done before" in capsys.readouterr().out
    assert begun == {p: p.stat().st_mtime_ns for p in Path("runs/papers/runs").rglob("*.*")}
    assert recorded().rows == first.rows

    for path, commit in zip(Path("runs/papers/runs").rglob("result.json"), "abba", strict=True):
        run = json.loads(path.read_text())
        run["environment"]["commit"] = f"{commit}+" if commit == "b" else commit
        path.write_text(json.dumps(run))
    assert reproduce() == 0
    assert recorded().environment["commit"] == "a, b+"


@pytest.mark.slow
def test_runs_of_train_are_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "h3(d_state=4)", "--device", "cpu", *TRAIN]
    assert main([*train, "--train.log_every", "1", "--out", "old/a"]) == 0
    assert main([*train, "--train.lr", "0.5", "--out", "old/b"]) == 0  # another run
    capsys.readouterr()
    assert reproduce("--from", "old") == 0
    shown = capsys.readouterr().out
    assert "runs taken over: 1\n4 runs, 1 of them done before" in shown
    (one,) = read_results(Path("old/a")).runs
    assert recorded().rows[0].values[0][0] == 100 * (one.by_length[3]["string_accuracy"] or 0.0)


@pytest.mark.slow
def test_a_record_is_verified_by_new_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of the same seeds are equal; a figure that was changed in the record is outside."""
    assert reproduce("--record") == 0
    capsys.readouterr()
    assert reproduce("--verify", "--rows", "LSTM") == 0
    shown = capsys.readouterr().out
    assert "0 of 6 figures are outside the spread of the record." in shown
    assert "A mean 5 deviations off is found in" in shown
    assert Path("runs/papers/verify/nobody/one/laptop/table.json").exists()
    path = RECORDS / "nobody/one-laptop.json"
    record = read_table(path)
    record.rows[1].values[2][:] = [7.0, 7.0]
    write_table(path, record)
    assert reproduce("--verify", "--rows", "LSTM") == 1
    assert "2 of 6 figures are outside the spread of the record." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify"], "nothing to verify: benchmarks/papers/nobody/one-laptop.json is missing"),
        (["--record", "--verify"], "take one of both"),
    ],
)
def test_a_record_is_not_lost(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(*options) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_single_rows_can_be_recorded_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--record") == 0
    path = RECORDS / "nobody/one-laptop.json"
    first, old = read_table(path), read_table(path)
    old = msgspec.structs.replace(old, note="as it was", environment={"commit": "a, b"})
    old.rows[1].values[0][:] = [1.0, 2.0]
    write_table(path, old)
    assert reproduce("--record", "--rows", "LSTM") == 0
    now = read_table(path)
    assert now.rows == first.rows
    assert now.note == "as it was"
    assert now.command == f"{first.command}; {first.command} --rows LSTM"
    assert {*str(now.environment["commit"]).split(", ")} >= {"a", "b"}
    write_table(path, msgspec.structs.replace(old, columns=["score", "x", "parameters"]))
    assert reproduce("--record", "--rows", "LSTM") == 2
    assert "record all rows again, without --rows" in capsys.readouterr().err


def test_other_seeds_of_a_row_are_added_to_its_record() -> None:
    assert reproduce("--record") == 0
    path = RECORDS / "nobody/one-laptop.json"
    whole = read_table(path)
    lstm = whole.rows[1]
    values, curves = [figures[1:] for figures in lstm.values], lstm.curves[1:]
    later = msgspec.structs.replace(lstm, seeds=[1], values=values, seconds=1.0, curves=curves)
    write_table(path, msgspec.structs.replace(whole, rows=[whole.rows[0], later]))
    assert reproduce("--record", "--rows", "LSTM", "--seeds", "0") == 0
    now = read_table(path).rows[1]
    assert (now.seeds, now.values, now.curves) == ([0, 1], lstm.values, lstm.curves)
    assert len(now.curves) == 2
    assert now.seconds is not None
    assert now.seconds >= 1

    wider = msgspec.structs.replace(later, parameters=1)
    write_table(path, msgspec.structs.replace(whole, rows=[whole.rows[0], wider]))
    assert reproduce("--record", "--rows", "LSTM", "--seeds", "0") == 0
    assert read_table(path).rows[1].seeds == [0]


def test_some_rows_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--rows", "LSTM") == 0
    assert [row.label for row in recorded().rows] == ["LSTM"]
    assert reproduce("--rows", "LSTM", "LSTM") == 2
    assert "the row 'LSTM' is given twice" in capsys.readouterr().err
    assert reproduce("--rows", "LTSM") == 2
    assert "unknown row 'LTSM': did you mean 'LSTM'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("then", "seed", "now", "expected"),
    [
        ([1.0, 2.0, 3.0], 1, 2.00001, "equal"),
        ([1.0, 2.0, 3.0], 7, 2.5, "within"),
        ([1.0, 2.0, 3.0], 1, 4.0, "within"),
        ([1.0, 2.0, 3.0], 1, 40.0, "outside"),
        ([2.0, 2.0], 0, 2.1, "outside"),
        ([2.0], 0, 2.0, "equal"),
        ([2.0], 0, 2.1, "no spread"),
        ([2.0, None], 1, None, "equal"),
        ([2.0, None], 1, 3.0, "no spread"),
        ([2.0, 2.5], 1, None, "no spread"),
    ],
)
def test_a_new_figure_is_held_against_the_spread(
    then: list[float | None], seed: int, now: float | None, expected: str
) -> None:
    def table(seeds: list[int], values: list[float | None]) -> TableRecord:
        row = RecordedRow(label="H3", seeds=seeds, values=[values])
        rest = {"command": "", "created": "", "environment": {}, "columns": ["score"]}
        return TableRecord(table="", size="laptop", rows=[row], **rest)  # type: ignore[arg-type]

    (found,) = verify(table([*range(len(then))], then), table([seed], [now]))
    assert found.agreement == expected


def test_without_training_the_table_has_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("--as_is") == 2
    assert "no run of nobody/one is there yet: leave out --as_is" in capsys.readouterr().err
    assert main(["train", "lstm", "--device", "cpu", *TRAIN[:-1], "4", "--out", "old"]) == 0
    speed = Path("old/speed/copying/result.json")  # as in the folder of a comparison
    speed.parent.mkdir(parents=True)
    speed.write_text("{}")
    assert reproduce("--from", "old", "--as_is") == 0
    assert [(row.label, row.seeds) for row in recorded().rows] == [("LSTM", [0])]


def test_two_commands_cannot_train_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    home = Path("runs/papers/nobody/one/laptop")
    with sole_writer(home):
        assert reproduce() == 2
        assert f"another process writes {home}" in capsys.readouterr().err
        assert not Path("runs/papers/runs").exists()
    assert reproduce() == 0
    with sole_writer(home):
        assert reproduce("--as_is") == 0


def test_tables_are_listed_with_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--recipes", "recipes"]) == 0
    assert capsys.readouterr().out == (
        "nobody/one: table 1. Tiny models learn nothing.\n  --size laptop: 2 rows; seconds\n"
    )


def test_stateline_has_its_tables_anywhere_within_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("h3/table_12: ") for line in lines)
    assert "with 3 seeds, " in " ".join(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody/oen"], "unknown table 'nobody/oen': did you mean 'nobody/one'?"),
        (["nobody/one", "--size", "paper"], "nobody/one has no size paper: take --size laptop"),
        (["nobody/one", "--seeds", "1", "1"], "seeds must be different numbers of at least 0"),
        (["nobody/one", "--from", "nothing"], "no folder nothing: --from takes folders"),
        (["--recipes", "nothing"], "no tables in nothing"),
        (["at.yaml"], "row 'H3' is scored at 3, 6, not at 4"),
        (["after.yaml"], "row 'H3' is scored every 1 of 2 updates, so not after 3"),
        (["score.yaml"], "row 'H3' has no score 'accuracy', but character_accuracy, string_acc"),
        (["mine.yaml"], "the table mine.yaml: Object missing required field `paper`"),
        (["none.yaml"], "cannot read the table none.yaml"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("place: table 1\n")
    Path("score.yaml").write_text(TABLE.replace("at: 3", "score: accuracy"))
    Path("at.yaml").write_text(TABLE.replace("at: 3", "at: 4"))
    Path("after.yaml").write_text(TABLE.replace("updates_to: 1.0", "after: 3"))
    assert main(["reproduce", "--recipes", "recipes", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not Path("runs").exists()
