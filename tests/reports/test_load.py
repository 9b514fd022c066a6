import copy
import json
import operator

import pytest

from stateline.errors import InputError
from stateline.reports import read_results


def stored(folder, results):
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_what_was_written_is_read(make, tmp_path):
    results = make.results()
    results["runs"][0] |= {"by_position": {"64": 2.0, "128": None}, "sample": "text"}
    results["runs"][0]["capacity"] = {"numbers": 8, "needed": None, "by_bits": {"0": 0.5}}
    assert read_results(stored(tmp_path, results)) == results


def test_a_run_that_diverged_is_read(make, tmp_path):
    results = make.results()
    results["runs"][0] |= {"curve": [], "by_length": {}}
    for length in (10, 20, 40):
        results["runs"][0]["by_length"][str(length)] = {"string_accuracy": None}
    assert read_results(stored(tmp_path, results)) == results


@pytest.mark.parametrize("version", ["stateline-results-2", 1, "", []])
def test_another_format_is_refused(make, tmp_path, version):
    with pytest.raises(InputError, match="must have the format 'stateline-results-1', got "):
        read_results(stored(tmp_path, make.results(format=version)))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "[" * 100_000, "\xff"])
def test_what_is_no_record_is_damaged(tmp_path, text):
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"results.json is damaged: .*; run its command again"):
        read_results(tmp_path)


def places(value, path=()):
    """Every place in a record, but for what is the task's own to fill."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key not in ("data", "environment", "training"):
            yield (*path, key)
            if isinstance(inner, dict | list):
                yield from places(inner, (*path, key))


def refused(folder, results, path, change):
    """Whether results are refused where ``change`` was made to what is at a place in them."""
    broken = copy.deepcopy(results)
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    try:
        read_results(stored(folder, broken))
    except InputError:
        return True
    return False


def test_whatever_is_of_the_wrong_kind_is_noticed(make, tmp_path):
    results = make.results()
    results["runs"][0] |= {"by_position": {"64": 2.0}, "sample": "text"}

    def spoil(inner, key):
        inner[key] = {"wrong": ["kind"]}

    found = list(places(results))
    assert len(found) > 200
    assert [path for path in found if not refused(tmp_path, results, path, spoil)] == []


def test_whatever_is_missing_is_noticed(make, tmp_path):
    results = make.results()
    optional = {"baselines", *(field for field in results["speed"][0] if "_" in field)} - {
        "d_model"
    }
    found = [
        path
        for path in places(results)
        if isinstance(path[-1], str) and not (len(path) == 4 and path[2] in optional)
    ]
    assert len(found) > 150
    drop = operator.delitem
    assert [path for path in found if not refused(tmp_path, results, path, drop)] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "s4d"}, "a run is of 's4d', which is not listed"),
        ({"task": "recall"}, "a run is of 'recall', which is not listed"),
        ({"by_position": {"-1": 2.0}}, "by_position has the length '-1'"),
        ({"by_position": {"0": 2.0}}, "by_position has the length '0'"),
        ({"by_position": {"064": 2.0}}, "by_position has the length '064'"),
        ({"by_position": {"\u0663": 2.0}}, "by_position has the length"),
        ({"seed": True}, "seed cannot be True"),
    ],
)
def test_what_a_report_could_not_show_is_named(make, tmp_path, change, message):
    results = make.results()
    results["runs"][0] |= change
    with pytest.raises(InputError, match=message):
        read_results(stored(tmp_path, results))


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(InputError, match=f"no results in {tmp_path}: results.json is missing; "):
        read_results(tmp_path)


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot read .*: Not a directory"):
        read_results(tmp_path / "file")
