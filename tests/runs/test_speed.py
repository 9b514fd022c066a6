"""Speeds of the models of a comparison: what is measured, stored and told."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stateline.bench.timing import Load
from stateline.cli.progress import show_news
from stateline.compare import Comparison, Job, plan
from stateline.runs import speed
from stateline.runs.results import SpeedRecord, from_json, to_json
from stateline.runs.speed import cells, time_jobs

RECALL = "associative_recall(length=4, batch_size=4)"


@pytest.fixture
def jobs() -> list[Job]:
    return plan(Comparison(["a=lstm", "b=lstm", "h3"], [RECALL], d_model=8, protocol="quick"))


def test_short_timings_are_few_and_full_ones_reach_far() -> None:
    assert cells("none") == []
    assert len(cells("short")) == 5
    full = set(cells("full"))
    for phase in ("prefill", "decode", "train"):
        for length in (256, 65536):
            assert {(phase, length, 1), (phase, length, 64)} <= full
    assert len(full) == len(cells("full"))
    assert {cell for cell in cells("short") if cell.phase == "train"} <= full


@pytest.mark.usefixtures("quick_speed")
def test_every_model_has_all_timings_with_their_spread(jobs: list[Job], tmp_path: Path) -> None:
    told: list[Any] = []
    records = time_jobs(jobs, tmp_path, detail="short", tell=told.append)
    assert told == cells("short")
    assert [record.model for record in records] == ["a", "b", "h3"]
    for record in records:
        assert [(t.phase, t.length, t.batch) for t in record.timings] == told
        for timing in record.timings:
            assert timing.low is not None
            assert timing.high is not None
            assert timing.tokens_per_second is not None
            assert timing.low <= timing.tokens_per_second <= timing.high
            assert timing.rounds >= 5
        assert list(record.train_tokens_per_second) == [8, 16]
        assert list(record.decode_tokens_per_second) == [8, 16]
        assert record.machine
        assert from_json(to_json(record), SpeedRecord) == record


@pytest.mark.usefixtures("quick_speed")
def test_what_was_measured_together_is_not_measured_again(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = time_jobs(jobs, tmp_path)
    measured: list[int] = []
    real = speed.measure

    def counted(subjects: Any, *arguments: Any) -> Any:
        measured.append(len(subjects))
        return real(subjects, *arguments)

    monkeypatch.setattr(speed, "measure", counted)
    assert time_jobs(jobs, tmp_path) == first
    assert measured == []
    time_jobs(jobs[1:], tmp_path)  # others were in the rounds: all are measured again
    assert measured == [2]


def test_without_timing_states_and_operations_are_counted(jobs: list[Job], tmp_path: Path) -> None:
    for record in time_jobs(jobs, tmp_path, detail="none"):
        assert (record.timings, record.train_tokens_per_second, record.busy) == ([], {}, None)
        assert record.state_bytes
        assert not record.disturbed


@pytest.mark.usefixtures("quick_speed")
@pytest.mark.parametrize(("cores", "disturbed"), [(None, False), (0.0, False), (99.0, True)])
def test_a_busy_machine_is_recorded_and_told(
    cores: float | None,
    disturbed: bool,
    jobs: list[Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(speed, "watch_load", lambda: nullcontext(Load(cores)))
    records = time_jobs(jobs[:1], tmp_path)
    assert records[0].disturbed is disturbed
    assert records[0].busy == (None if cores is None else min(1.0, cores))
    shown = StringIO()
    with show_news(Console(file=shown, width=200)) as news:
        news.timed(records)
    assert ("other programs used 100% of the processors" in shown.getvalue()) is disturbed


def test_records_of_older_versions_are_read() -> None:
    old = SpeedRecord(
        model="h3",
        task="copying",
        d_model=8,
        parameters=1,
        train_tokens_per_second={},
        decode_tokens_per_second={},
        state_bytes={},
        flops_per_token={},
    )
    assert (old.timings, old.threads, old.machine, old.busy) == ([], 1, "", None)
