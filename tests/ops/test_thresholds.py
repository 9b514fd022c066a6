"""Thresholds: defaults, what was measured on a machine, and files that cannot be used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stateline.bench import tune
from stateline.errors import InputError
from stateline.ops import fft_conv, short_conv, thresholds
from stateline.ops.thresholds import DEFAULTS, VARIABLE, threshold


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own.json"))
    thresholds._measured.cache_clear()
    yield tmp_path / "own.json"
    thresholds._measured.cache_clear()


def test_without_a_file_the_defaults_hold(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert {name: threshold(name) for name in DEFAULTS} == DEFAULTS


def test_what_was_stored_holds(file: Path) -> None:
    tune.store({"short_conv.fft_taps": 3}, file)
    thresholds._measured.cache_clear()
    assert threshold("short_conv.fft_taps") == 3
    assert threshold("attention.narrow_head") == DEFAULTS["attention.narrow_head"]
    u, kernel = torch.randn(1, 9, 2), torch.randn(2, 3)
    assert short_conv(u, kernel, backend="torch").equal(fft_conv(u, kernel, backend="torch"))


@pytest.mark.parametrize("text", ["[]", "{", '{"short_conv.fft_taps": -1}', '{"speed": 3}'])
def test_a_file_that_cannot_be_used_is_one_line(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError, match="file of thresholds") as error:
        threshold("short_conv.fft_taps")
    assert "\n" not in str(error.value)


def test_the_threshold_is_where_the_total_time_is_least() -> None:
    def crossing(inclusive: bool, times: list[tuple[float, float]]) -> int:
        sizes = [1, 2, 4]
        waits = dict(zip(sizes, times, strict=True))
        made = tune.Crossing(
            "attention.narrow_head", sizes, lambda n: waits[n][0], lambda n: waits[n][1], inclusive
        )
        return tune._measure(made, 0.0)

    class Took:
        def __init__(self, seconds: float) -> None:
            self.median = seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "interleave", lambda calls, **_: {k: Took(v) for k, v in calls.items()})
        assert crossing(True, [(1, 2), (1, 2), (2, 1)]) == 2
        assert crossing(True, [(2, 1), (2, 1), (2, 1)]) == 0
        assert crossing(False, [(1, 2), (2, 1), (2, 1)]) == 2
        assert crossing(False, [(1, 2), (1, 2), (1, 2)]) == 5
        assert crossing(True, [(1, 2), (3, 2), (1, 9)]) == 4  # one size out of line does not count


def test_every_threshold_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(tune, "SHAPE", (1, 16, 64))
    monkeypatch.setattr("stateline.bench.timing.SAMPLE_SECONDS", 0.0)
    found = tune.tune(0.0, lambda _: None)
    assert found.keys() == DEFAULTS.keys()
    tune.store(found, tmp_path / "own.json")
    assert json.loads((tmp_path / "own.json").read_text()) == found
