"""The format of results: what is read, what is refused, what files written before mean."""

import copy
import json
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stateline.cli import main
from stateline.errors import InputError
from stateline.runs import CapacityRecord, Results, RunRecord, read_results, read_run, stored_run
from stateline.runs.results import UNSET, convert, to_json

OLD = Path(__file__).parent / "old"
"""Results written before they were typed: a comparison of two runs on copying, one on text."""


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads((OLD / "results.json").read_text())


def stored(folder: Path, results: object) -> Path:
    (folder / "results.json").write_text(json.dumps(results))
    return folder


class TestOldResults:
    def test_a_comparison_is_read(self) -> None:
        found = read_results(OLD)
        assert found.models == ["lstm", "h3(d_state=4)"]
        first, diverging, text = found.runs
        assert set(first.by_length[3]) == {"string_accuracy", "character_accuracy"}
        assert first.capacity == CapacityRecord(numbers=8, needed=None, by_bits={0: 0.5, 16: 1.0})
        assert diverging.curve[-1].loss is not None
        assert math.isnan(diverging.curve[-1].loss)
        assert (first.sample, text.sample is not None) == (None, True)
        assert max(text.by_position) == 64
        assert [entry.longest_copy for entry in found.speed] == [UNSET, 204]
        assert found.speed[0].device == "cpu"

    def test_a_run_is_read(self) -> None:
        run = read_run(OLD)
        assert run == read_results(OLD).runs[2]
        assert run is not None
        assert (run.seed, run.training["seed"], run.imports) == (1, 1, [])

    def test_what_is_written_now_has_the_same_fields(self, results: dict[str, Any]) -> None:
        """But for those that were added since."""
        written = json.loads(to_json(read_results(OLD)))
        for part in ("runs", "speed", "tasks"):
            for before, now in zip(results[part], written[part], strict=True):
                assert before.keys() <= now.keys()
        assert convert(written, Results).tasks == read_results(OLD).tasks

    def test_a_report_is_made_of_them(self, tmp_path: Path) -> None:
        assert main(["report", str(OLD), "--out", str(tmp_path)]) == 0
        assert "<h2>Copying</h2>" in (tmp_path / "report.html").read_text()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    before = read_results(OLD)
    (tmp_path / "results.json").write_text(to_json(before, indent=1))
    after = read_results(tmp_path)
    assert after.tasks == before.tasks
    assert [run.by_length for run in after.runs] == [run.by_length for run in before.runs]
    assert after.runs[1].curve[-1].loss is None  # JSON has no NaN


def test_results_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        read_results(OLD).runs[0].seed = 3  # type: ignore[misc]


def test_a_key_in_place_of_an_attribute_is_told_so() -> None:
    with pytest.raises(InputError, match=r"write \.runs instead of \['runs'\]"):
        read_results(OLD)["runs"]


def test_a_field_that_was_added_later_is_ignored(tmp_path: Path, results: dict[str, Any]) -> None:
    changed = copy.deepcopy(results)
    for part in (changed, changed["runs"][0], changed["speed"][0], changed["tasks"][0]):
        part["added_later"] = {"any": ["thing"]}
    assert read_results(stored(tmp_path, changed)).tasks == read_results(OLD).tasks


@pytest.mark.parametrize("version", ["stateline-results-2", 1, "", []])
def test_another_format_is_refused(
    tmp_path: Path, results: dict[str, Any], version: object
) -> None:
    with pytest.raises(InputError, match="the format must be 'stateline-results-1', got "):
        read_results(stored(tmp_path, results | {"format": version}))


DEEP = "[" * 100_000
NOT_RESULTS = ["", "{", "[]", "{}", "null", "3", '"text"', DEEP, '{"runs": ' + DEEP, "9" * 5000]


@pytest.mark.parametrize("text", [*NOT_RESULTS, "\xff"], ids=lambda text: text[:12])
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str) -> None:
    for name, read in (("results.json", read_results), ("result.json", read_run)):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match=rf"{name} is damaged: .*; run its command") as caught:
            read(tmp_path)
        assert len(str(caught.value).splitlines()) == 1
    assert stored_run(tmp_path) is None


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "result.json"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(InputError, match=r"cannot read .*result\.json: it is a"):
        read_run(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Every place in a record, apart from what is free in form."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key not in ("data", "environment", "training"):
            yield (*path, key)
            if isinstance(inner, dict | list):
                yield from places(inner, (*path, key))


def refused(folder: Path, results: Any, path: tuple[Any, ...], change: Any) -> bool:
    """Whether results are refused after ``change`` was made at one place."""
    broken = copy.deepcopy(results)
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    try:
        read_results(stored(folder, broken))
    except InputError as error:
        return len(str(error).splitlines()) == 1
    return False


def test_a_value_of_the_wrong_type_is_refused_wherever_it_is(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    def spoil(inner: Any, key: Any) -> None:
        inner[key] = {"wrong": ["type"]}

    found = list(places(results))
    assert len(found) > 150
    assert [path for path in found if not refused(tmp_path, results, path, spoil)] == []


def test_a_missing_field_is_refused_wherever_it_was(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    required = {
        field.name
        for kind in (Results, *(record_type(name) for name in ("Task", "Run", "Speed")))
        for field in msgspec.structs.fields(kind)
        if field.required
    }
    found = [path for path in places(results) if path[-1] in required | {"step", "loss", "metric"}]
    assert len(found) > 80
    drop = operator.delitem
    assert [path for path in found if not refused(tmp_path, results, path, drop)] == []


def record_type(name: str) -> Any:
    from stateline.runs import results

    return getattr(results, f"{name}Record")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "s4d"}, "model 's4d' of a record is not listed in models"),
        ({"task": "recall"}, "task 'recall' of a run is not listed in tasks"),
        ({"by_position": {"-1": 2.0}}, r"Expected `int` >= 1 - at `key` in `\$.runs\[0\]"),
        ({"by_position": {"0": 2.0}}, r"Expected `int` >= 1"),
        ({"by_position": {"064": 2.0}}, r"Expected `int`, got `str` - at `key`"),
        ({"by_position": {"\u0663": 2.0}}, r"Expected `int`, got `str` - at `key`"),
        ({"by_length": {"2": {}, "3": {}}}, "lacks 'string_accuracy' at length 3"),
        ({"by_length": {"3": {"string_accuracy": 1}}}, "lacks 'string_accuracy' at length 4"),
        ({"seed": True}, r"Expected `int`, got `bool` - at `\$.runs\[0\].seed`"),
        ({"model": "two\nlines"}, r"model 'two\\nlines' of a record"),
    ],
)
def test_results_that_a_report_cannot_show_are_refused(
    tmp_path: Path, results: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    results["runs"][0] |= change
    with pytest.raises(InputError, match=message):
        read_results(stored(tmp_path, results))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["speed"][0].update(model="s4d"), "model 's4d' of a record is not"),
        (lambda found: found["tasks"][0].update(train_length=7), "train_length 7 is not in eval_"),
        (lambda found: found.update(models=[], runs=[], speed=[]), "at least one model and one"),
        (lambda found: found.update(tasks=[], runs=[]), "at least one model and one task"),
    ],
)
def test_parts_of_results_that_do_not_fit_one_another_are_refused(
    tmp_path: Path,
    results: dict[str, Any],
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    change(results)
    with pytest.raises(InputError, match=message):
        read_results(stored(tmp_path, results))


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no results in {tmp_path}: results.json is missing; "):
        read_results(tmp_path)
    assert read_run(tmp_path) is None


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"no results in .*file: .*; give the folder"):
        read_results(tmp_path / "file")


def test_the_settings_of_a_run_do_not_contain_its_seed() -> None:
    run = read_results(OLD).runs[0]
    other = msgspec.structs.replace(run, seed=9, training=run.training | {"seed": 9})
    assert run.settings == other.settings
    assert run.settings != msgspec.structs.replace(run, d_model=9).settings


def test_each_field_is_defined_once() -> None:
    """Names of fields are annotations nowhere else in the package."""
    import stateline

    source = Path(stateline.__file__).parent
    fields = {f.name for f in msgspec.structs.fields(RunRecord)} & {
        "parameters_wanted",
        "by_length",
        "by_position",
    }
    assert len(fields) == 3
    found = [
        (path.name, line.strip())
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        for field in fields
        if f'"{field}":' in line or line.strip().startswith(f"{field}: ")
    ]
    homes = {name for name, _ in found}
    assert homes == {"results.py", "job.py"}, found
