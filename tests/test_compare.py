import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from rich.console import Console

from stateline.capacity import BITS
from stateline.compare import Comparison, Job, News, compare, plan
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.checkpoint import load_model
from stateline.models.size import count_parameters
from stateline.reports import print_results, read_results, write_report
from stateline.runs.results import Results, RunRecord, to_json
from stateline.tasks import make_task
from stateline.train.metrics import Metrics
from tests.conftest import ONE_PROCESS, QUICK_SPEED
from tests.tasks.small_data import task_on

RECALL = "associative_recall(length=4, batch_size=4)"


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A task on a small text."""
    (tmp_path / "text").write_text("the quick brown fox " * 30)
    return f"text(path={tmp_path / 'text'}, length=16, batch_size=2)"


def tiny(*tasks: str, **changes: Any) -> Comparison:
    """One run of three steps per model and task, unless the protocol is changed."""
    settings = {
        **{"patterns": ["attention", "h3"], "d_model": 8, "steps": 3, "protocol": "quick"},
        **changes,
    }
    return Comparison(tasks=tasks or (RECALL,), **settings)


class TestPlan:
    def test_the_first_pattern_sets_the_size_and_the_others_match_it(self) -> None:
        first, *others = plan(tiny(patterns=["attention*2", "h3", "lstm*3"], d_model=24))
        assert first.model.d_model == 24
        assert {job.parameters_wanted for job in others} == {count_parameters(first.model)}
        for job in others:
            near = [
                dataclasses.replace(job.model, d_model=job.model.d_model + step)
                for step in (-4, 0, 4)
            ]
            off = [abs(count_parameters(m) - job.parameters_wanted) for m in near]
            assert off[1] == min(off)

    def test_a_number_of_parameters_may_be_asked_for(self) -> None:
        jobs = plan(tiny(parameters=20_000))
        assert all(abs(count_parameters(job.model) / 20_000 - 1) < 0.1 for job in jobs)
        assert {job.parameters_wanted for job in jobs} == {20_000}

    def test_the_vocabulary_is_that_of_each_task(self) -> None:
        jobs = plan(tiny(RECALL, "copying"))
        assert [job.model.vocab_size for job in jobs] == [10, 10, 30, 30]

    def test_settings_override_those_of_the_task(self) -> None:
        own = make_task(RECALL).training
        for given, steps, rate in [(None, own["steps"], own["lr"]), (7, 7, 7.0)]:
            training = plan(tiny(steps=given, lr=given and float(given)))[0].training
            assert (training.steps, training.lr) == (steps, rate)
            assert training.schedule == own["schedule"]

    def test_a_repeat_count_is_a_number_of_seeds(self) -> None:
        jobs = plan(tiny(f"{RECALL}*3", patterns=["h3"]))
        assert [job.training.seed for job in jobs] == [0, 1, 2]
        assert {job.task for job in jobs} == {RECALL}

    def test_what_is_given_twice_is_done_once(self) -> None:
        once = plan(tiny(f"{RECALL}*2"))
        spelled_otherwise = RECALL.replace(", ", " ,  ")
        twice = tiny(RECALL, f"{spelled_otherwise}*2", patterns=["attention", "h3", " h3 "])
        names = [job.name for job in plan(twice)]
        assert sorted(names) == sorted(job.name for job in once)

    def test_every_run_has_a_folder_of_its_own(self) -> None:
        jobs = [
            job
            for steps in (3, 4)
            for job in plan(tiny(f"{RECALL}*2", "copying", "copying(max_len=9)", steps=steps))
        ]
        assert len({job.name for job in jobs}) == len(jobs) == 16

    def test_runs_on_another_text_are_other_runs(self, text: str, tmp_path: Path) -> None:
        names = {job.name for job in plan(tiny(text))}
        (tmp_path / "text").write_text("another text " * 30)
        assert not names & {job.name for job in plan(tiny(text))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patterns": ["attention", "h33"]}, "unknown layer 'h33': did you mean 'h3'"),
        ({"patterns": ["h3("]}, "malformed pattern"),
        ({"patterns": []}, "a comparison needs at least one pattern and one task"),
        ({"tasks": [RECALL, "copyng"]}, "unknown task 'copyng': did you mean 'copying'"),
        ({"tasks": ["ngram_lookup(n=1, n_letters=2)"]}, "must hold n letters that occur once"),
        ({"tasks": ["copying(length=3)"]}, "unknown keyword of Copying 'length'"),
        ({"tasks": ["text(path=nowhere)"]}, "got 'nowhere', which does not exist"),
        ({"d_model": 0}, "wants d_model to be int from 1 to 16,777,216, got 0"),
        ({"d_model": 10}, "n_heads must divide d_model"),
        ({"parameters": 0}, "parameters must be at least 1, got 0"),
        ({"steps": 0}, "wants steps to be int of at least 1, got 0"),
        ({"lr": -1.0}, "wants lr to be a finite number above 0, got -1.0"),
    ],
)
def test_a_mistake_is_named_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    comparison = dataclasses.replace(tiny(), **changes)
    with pytest.raises(InputError, match=message):
        compare(comparison, tmp_path / "run", command="")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be at least 0, got workers=-1"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "device cuda:99 was asked for, but this machine has"),
        ({"device": "meta"}, "cannot be trained on the device meta"),
    ],
)
def test_workers_and_devices_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compare(tiny(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_named_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*/file/run: "):
        compare(tiny(), tmp_path / "file" / "run", command="")


def test_the_results_of_a_run_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "results.json").write_text("of the run")
    with pytest.raises(InputError, match="holds a run, not a comparison: choose another with"):
        compare(tiny(), tmp_path, command="")
    assert (tmp_path / "results.json").read_text() == "of the run"


def without_times(typed: Results) -> dict[str, Any]:
    """Results as plain data, without what differs from run to run."""
    results = json.loads(to_json(typed))
    times = ("seconds", "compile_seconds", "tokens_per_second")
    runs = [
        {key: value for key, value in run.items() if key not in times} for run in results["runs"]
    ]
    for run in runs:  # somebody may commit meanwhile
        run["environment"] = {**run["environment"], "commit": ""}
    speed = [
        {
            key: value
            for key, value in entry.items()
            if not key.endswith("per_second") and key not in ("timings", "busy")
        }
        for entry in results["speed"]
    ]
    return {**results, "created": "", "runs": runs, "speed": speed}


class StopAfterOne(News):
    """Ctrl-C is pressed when the first run is done."""

    def finished(self, job: Job, run: RunRecord) -> None:
        raise KeyboardInterrupt


class Compared(NamedTuple):
    """A comparison of two models on recall, from two seeds, and on a text."""

    folder: Path
    text: str
    results: Results


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    (folder / "text").write_text("the quick brown fox " * 30)
    text = f"text(path={folder / 'text'}, length=16, batch_size=2)"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUICK_SPEED, **ONE_PROCESS}.items():
            patch.setattr(f"stateline.{name}", value)
        results = compare(tiny(f"{RECALL}*2", text), folder / "out", command="stateline compare")
    return Compared(folder / "out", text, results)


class TestResults:
    def test_they_hold_all_that_reports_show(self, compared: Compared, tmp_path: Path) -> None:
        assert compared.results == read_results(compared.folder)
        shown = StringIO()
        print_results(compared.results, Console(file=shown, width=100))  # as the command does
        write_report(compared.results, tmp_path / "report.html")
        for told in ("Associative recall", "Text", "h3", "attention", "gzip"):
            assert told in shown.getvalue()
            assert told in (tmp_path / "report.html").read_text()

    def test_there_is_a_run_for_every_model_task_and_seed(self, compared: Compared) -> None:
        assert compared.results.finished
        assert [(run.task, run.model, run.seed) for run in compared.results.runs] == [
            *[(RECALL, "attention", 0), (RECALL, "attention", 1)],
            *[(RECALL, "h3", 0), (RECALL, "h3", 1)],
            *[(compared.text, "attention", 0), (compared.text, "h3", 0)],
        ]

    def test_a_run_tells_its_scores_at_every_length(self, compared: Compared) -> None:
        recall, _, on_text = [run for run in compared.results.runs if run.model == "h3"]
        assert list(recall.by_length) == [4, 8, 16]
        assert all(0 <= (scores["accuracy"] or 0) <= 1 for scores in recall.by_length.values())
        assert list(on_text.by_length) == [16, 64]
        assert all(6 < (s["bits_per_byte"] or 0) < 10 for s in on_text.by_length.values())
        assert (recall.steps, recall.stopped) == (3, "finished")
        assert [point.step for point in recall.curve] == [3]
        (job,) = [job for job in plan(tiny()) if job.label == "h3"]
        assert recall.parameters == count_parameters(job.model)

    def test_a_run_can_be_loaded_as_a_model(self, compared: Compared) -> None:
        for job in plan(tiny()):
            assert load_model(compared.folder / "runs" / job.name).config == job.model

    def test_speed_is_measured_once_per_pattern_on_text_if_there_is_some(
        self, compared: Compared
    ) -> None:
        speed = compared.results.speed
        assert [(entry.task, entry.model) for entry in speed] == [
            *[(compared.text, "attention"), (compared.text, "h3")]
        ]
        for entry in speed:
            for measured in (entry.train_tokens_per_second, entry.decode_tokens_per_second):
                assert list(measured) == [8, 16]
                assert all(0 < value < math.inf for value in measured.values())

    def test_it_is_told_how_long_a_string_fits_the_state(self, compared: Compared) -> None:
        attention, h3 = compared.results.speed
        assert attention.longest_copy is None
        assert h3.longest_copy

    def test_the_baselines_of_a_text_are_there(self, compared: Compared) -> None:
        _, task = compared.results.tasks
        assert set(task.baselines) == {"gzip", "xz"}
        assert task.data["n_files"] == 1


@pytest.mark.usefixtures("quick_speed", "one_process")
class TestRuns:
    def test_layers_that_read_both_ways_are_compared_where_rows_are_classified(
        self, tmp_path: Path
    ) -> None:
        patterns, task = ["h3", "bidirectional(h3)"], task_on("eeg", tmp_path, frame=4)
        results = compare(tiny(task, patterns=patterns), tmp_path / "out", command="")
        assert [run.model for run in results.runs] == patterns
        assert all(0 <= s["accuracy"] <= 1 for run in results.runs for s in run.by_length.values())
        assert [bool(speed.state_bytes) for speed in results.speed] == [True, False]
        write_report(results, tmp_path / "report.html")
        print_results(results, Console(file=StringIO()))

    def test_a_text_is_scored_to_its_end(
        self, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stateline.tasks.text.corpus.TOKENS_PER_BATCH", 16)
        comparison = tiny(text, patterns=["h3"])
        (run,) = compare(comparison, tmp_path, command="").runs
        model = load_model(tmp_path / "runs" / plan(comparison)[0].name)
        part, whole = (evaluate(model, make_task(text), 16, batches=n) for n in (1, 0))
        assert run.by_length[16] == whole != part

    @pytest.mark.slow
    def test_the_bits_that_are_needed_stand_with_runs_that_solved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs = compare(tiny(RECALL), tmp_path / "a", command="").runs
        assert not any(run.capacity for run in runs)
        monkeypatch.setattr("stateline.tasks.AssociativeRecall.solved_at", 0.0)
        attention, _ = compare(tiny(RECALL), tmp_path / "b", command="").runs
        assert attention.capacity is not None
        assert attention.capacity.numbers > 0
        assert set(attention.capacity.by_bits) == set(BITS)

    def test_a_run_that_diverges_is_told_and_the_others_go_on(
        self, tmp_path: Path, text: str
    ) -> None:
        results = compare(tiny(RECALL, text, lr=1e38), tmp_path, command="")
        assert len(results.runs) == 4
        for run in results.runs:
            assert run.stopped.startswith("the loss became nan at step 2: ")
            assert run.steps == 1
            assert {score for own in run.by_length.values() for score in own.values()} == {None}
        print_results(read_results(tmp_path), Console(file=StringIO()))
        write_report(read_results(tmp_path), tmp_path / "report.html")


@pytest.mark.usefixtures("quick_speed", "one_process")
class TestResuming:
    def test_nothing_that_is_done_is_done_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = compare(tiny(), tmp_path, command="")

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("done again")

        monkeypatch.setattr("stateline.runs.speed.measure", fail)
        monkeypatch.setattr("stateline.compare.pool.run_job", fail)
        again = compare(tiny(), tmp_path, command="")
        assert replace(again, created="") == replace(first, created="")

    @pytest.mark.slow
    def test_an_interrupted_comparison_ends_as_an_uninterrupted_one(
        self, tmp_path: Path, text: str
    ) -> None:
        with pytest.raises(KeyboardInterrupt):
            compare(tiny(RECALL, text), tmp_path / "a", command="", news=StopAfterOne())
        assert len(read_results(tmp_path / "a").runs) == 1
        assert not read_results(tmp_path / "a").finished
        resumed = compare(tiny(RECALL, text), tmp_path / "a", command="")
        whole = compare(tiny(RECALL, text), tmp_path / "b", command="")
        assert without_times(resumed) == without_times(whole)

    def test_results_hold_what_was_done_before_from_the_start(self, tmp_path: Path) -> None:
        class Look(News):
            def planned(self, jobs: int, done: int) -> None:
                assert (jobs, done) == (2, 1)
                assert len(read_results(tmp_path).runs) == 1

        with pytest.raises(KeyboardInterrupt):
            compare(tiny(), tmp_path, command="", news=StopAfterOne())
        compare(tiny(), tmp_path, command="", news=Look())

    def test_a_comparison_can_be_extended(self, tmp_path: Path) -> None:
        compare(tiny(), tmp_path, command="")
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
        results = compare(tiny(RECALL, f"{RECALL}*2"), tmp_path, command="")
        assert len(results.runs) == 4
        assert len(before) == 3  # two runs, and the speeds
        assert all(path.stat().st_mtime_ns == then for path, then in before.items())

    @pytest.mark.parametrize(
        "content",
        [
            b'{"model": ',
            pytest.param(b"", marks=pytest.mark.slow),
            pytest.param(b"\xff\xfe", marks=pytest.mark.slow),
            pytest.param(b"null", marks=pytest.mark.slow),
        ],
    )
    def test_a_damaged_result_is_done_again(self, tmp_path: Path, content: bytes) -> None:
        whole = compare(tiny(), tmp_path, command="")
        path = tmp_path / "runs" / plan(tiny())[0].name / "result.json"
        path.write_bytes(content)
        assert without_times(compare(tiny(), tmp_path, command="")) == without_times(whole)


@pytest.mark.usefixtures("quick_speed")
class TestWorkers:
    @pytest.mark.slow
    def test_workers_come_to_the_same_results(
        self, tmp_path: Path, text: str, request: pytest.FixtureRequest
    ) -> None:
        told: list[tuple[str, int]] = []

        class Listen(News):
            def progress(self, job: Job, metrics: Metrics) -> None:
                told.append((job.model.pattern, metrics.step))

        by_workers = compare(tiny(text), tmp_path / "a", command="", workers=2, news=Listen())
        request.getfixturevalue("one_process")
        alone = compare(tiny(text), tmp_path / "b", command="")
        assert without_times(by_workers) == {
            **without_times(alone),
            "environment": dict(by_workers.environment),
        }
        assert sorted(told) == [("attention", 3), ("h3", 3)]

    @pytest.mark.slow
    def test_a_worker_that_is_killed_is_told_in_one_line(self, tmp_path: Path) -> None:
        class Kill(News):
            def progress(self, job: Job, metrics: Metrics) -> None:
                for child in active_children():
                    child.kill()

        endless = tiny(patterns=["attention"], steps=1_000_000)
        with pytest.raises(InputError, match=r"was killed, .* the same command resumes") as caught:
            compare(endless, tmp_path, command="", workers=1, news=Kill())
        assert len(str(caught.value).splitlines()) == 1
        wait_for(lambda: not active_children())


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread, however busy the machine
from stateline.cli import main
main()
"""


def wait_for(condition: Callable[[], object], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.usefixtures("quick_speed", "one_process")
@pytest.mark.slow
def test_a_comparison_that_is_killed_leaves_no_worker_and_resumes(tmp_path: Path) -> None:
    patterns, steps = ["attention", "s4d"], 500
    first, second = (
        tmp_path / "runs" / job.name for job in plan(tiny(patterns=patterns, steps=steps))
    )
    options = f"--tasks;{RECALL};--d_model;8;--steps;{steps};--workers;1;--out;{tmp_path}"
    options += ";--protocol;quick"
    whole = subprocess.Popen(
        [sys.executable, "-c", ON_ONE_CORE, "compare", *patterns, *options.split(";")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = second / "metrics.jsonl"
    wait_for(lambda: whole.poll() is not None or (log.exists() and log.stat().st_size))
    workers = Path(f"/proc/{whole.pid}/task/{whole.pid}/children").read_text().split()
    whole.send_signal(signal.SIGKILL)
    assert whole.wait() == -signal.SIGKILL
    assert not (second / "result.json").exists()
    wait_for(lambda: not any(lives(int(worker)) for worker in workers))
    assert workers

    before = (first / "result.json").stat().st_mtime_ns
    results = compare(tiny(patterns=patterns, steps=steps), tmp_path, command="")
    assert (first / "result.json").stat().st_mtime_ns == before
    assert [run.steps for run in results.runs] == [steps, steps]
