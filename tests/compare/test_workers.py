"""Where a comparison trains: in workers or in this process, on which device, with whose code."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from msgspec.structs import replace

from stateline.cli import main
from stateline.compare import Comparison, News, compare, plan, pool
from stateline.compare.own_code import own_code
from stateline.compare.pool import local
from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.plugins import import_code
from stateline.reports import read_results
from stateline.runs.folder import recorded_imports
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.loop import prepared

RECALL = "associative_recall(length=4, batch_size=4)"

LAYER = '''
"""A layer outside the package: an exponential moving average of each channel, then a map."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from stateline.layers import LAYERS, SequenceLayer, accumulates


@accumulates("mean")
class AverageState(NamedTuple):
    mean: Tensor


class MovingAverage(SequenceLayer[AverageState]):
    def __init__(self, d_model: int, *, decay: float = 0.9) -> None:
        super().__init__(d_model)
        self.decay = decay
        self.out_proj = nn.Linear(d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> AverageState:
        return AverageState(torch.zeros(batch_size, self.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def forward_chunk(self, x: Tensor, state: AverageState) -> tuple[Tensor, AverageState]:
        means = []
        for now in x.unbind(1):
            state = AverageState(self.decay * state.mean + (1 - self.decay) * now)
            means.append(state.mean)
        return self.out_proj(torch.stack(means, dim=1)), state


LAYERS["moving_average"] = MovingAverage
'''

COMPARE = f"""
from pathlib import Path
from stateline.compare import Comparison, compare
from stateline.runs import speed as costs
costs.SECONDS, costs.SPEED_LENGTHS = 0.0, (8,)
models = ["moving_average*2", "h3*2"]
comparison = Comparison(models, ["{RECALL}"], d_model=8, steps=2, protocol="quick")
"""


def tiny(*patterns: str, **changes: Any) -> Comparison:
    settings = {"d_model": 8, "steps": 2, "protocol": "quick", **changes}
    return Comparison(patterns, [RECALL], **settings)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)


@pytest.fixture
def layer_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_layers.py"
    path.write_text(LAYER)
    return path


def python(folder: Path, script: str, *, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script that has no main guard, from a file or from standard input."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-" if stdin else "script.py"]
    return subprocess.run(
        command,
        cwd=folder,
        input=script if stdin else None,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_script_from_stdin_without_a_guard_compares_an_imported_layer_in_workers(
    layer_file: Path,
) -> None:
    script = f"""
from stateline.plugins import import_code
import_code("my_layers.py")
{COMPARE}
compare(comparison, Path("run"), workers=2)
"""
    done = python(layer_file.parent, script, stdin=True)
    assert done.returncode == 0, done.stderr
    results = read_results(layer_file.parent / "run")
    assert [run.model for run in results.runs] == ["moving_average*2", "h3*2"]
    assert all(run.imports == [str(layer_file)] for run in results.runs)
    folders = (layer_file.parent / "run" / "runs").iterdir()
    assert all(recorded_imports(folder) == [str(layer_file)] for folder in folders)


@pytest.mark.usefixtures("unannotated")
def test_what_workers_log_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workers = pool._Workers(tmp_path, ["cpu", "cpu"], News(), 1)
    with caplog.at_level("INFO", "stateline"):
        for text, level in [("a", 20), ("a", 20), ("b", 30), ("c", 10)]:
            workers._pass_on(logging.LogRecord("stateline", level, "", 0, text, None, None))
    assert caplog.messages == ["a", "b"]


def test_workers_that_have_died_before_a_job_is_submitted_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ProcessPoolExecutor):
        def submit(self, *_: object) -> NoReturn:  # type: ignore[override]
            raise BrokenProcessPool

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Broken)
    with pytest.raises(InputError, match=r"could not start: .* --workers 0 \(workers=0 in Python"):
        compare(tiny("lstm"), tmp_path, workers=1, timing="none")


@pytest.mark.slow
def test_that_kernels_are_compiled_is_told_once(tmp_path: Path) -> None:
    """Workers compile at the same time, and the command says it for all of them."""
    options = ["--tasks", "associative_recall(length=4, batch_size=4)", "--protocol", "quick"]
    options += ["--d_model", "8", "--steps", "1", "--workers", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "stateline", "compare", "lstm", "s4d", *options, "--out", "out"],
        cwd=tmp_path,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert any((tmp_path / "kernels").rglob("*.nbc"))
    assert done.stderr.count("compiling new CPU kernels") == 1


@pytest.mark.slow
def test_a_class_of_a_script_without_a_guard_is_told_in_one_line(layer_file: Path) -> None:
    done = python(layer_file.parent, LAYER + COMPARE + 'compare(comparison, Path("run"))')
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stateline.errors.InputError: the worker processes could not import")
    assert 'if __name__ == "__main__":' in last
    assert "workers=0" in last


@pytest.mark.slow
def test_a_class_of_a_guarded_script_reaches_the_workers(layer_file: Path) -> None:
    guarded = '\nif __name__ == "__main__":\n    compare(comparison, Path("run"), workers=1)\n'
    done = python(layer_file.parent, LAYER + COMPARE + guarded)
    assert done.returncode == 0, done.stderr
    assert len(read_results(layer_file.parent / "run").runs) == 2


@pytest.fixture
def registered(layer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is registered and imported, until the test ends."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("stateline.plugins._imported", {})
    import_code(str(layer_file))
    yield  # type: ignore[misc]
    del LAYERS["moving_average"], sys.modules["my_layers"]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registered")
def test_a_worker_registers_what_its_parent_has_registered() -> None:
    code, known = own_code(), LAYERS["moving_average"]
    del LAYERS["moving_average"]  # type: ignore[attr-defined]
    code.restore()
    assert LAYERS["moving_average"] is known
    assert not code.main


@pytest.mark.usefixtures("registered")
def test_a_class_that_no_worker_can_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(LAYERS["moving_average"]):  # type: ignore[misc]
        pass

    monkeypatch.setattr("stateline.compare.own_code._TABLES", {"layer": {"inner": Inner}})
    with pytest.raises(InputError, match=r"the layer 'inner' cannot be imported .*--workers 0"):
        own_code()


@pytest.mark.usefixtures("quick_speed")
class TestInThisProcess:
    def test_a_task_is_constructed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = []

        def counted(spec: str, **keywords: Any) -> Any:
            made.append(spec)
            return make_task(spec, **keywords)

        for place in ("stateline.compare.comparison", "stateline.runs.start"):
            monkeypatch.setattr(f"{place}.make_task", counted)
        compare(tiny("h3", "lstm"), tmp_path, workers=0)
        assert made == [RECALL]

    def test_every_seed_trains_on_data_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seeds = []

        def look(model: Any, task: Any, config: TrainConfig, **keywords: Any) -> Any:
            seeds.append((task.seed, config.seed))
            return prepared(model, task, config, **keywords)

        monkeypatch.setattr("stateline.runs.start.prepared", look)
        compare(tiny("h3", seeds=2), tmp_path, workers=0)
        assert seeds == [(0, 0), (1, 1)]

    def test_it_trains_on_one_thread_and_leaves_the_number_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads, during = torch.get_num_threads(), []

        def look(*arguments: Any, **keywords: Any) -> Any:
            during.append(torch.get_num_threads())
            return run_job(*arguments, **keywords)

        run_job = pool.run_job
        monkeypatch.setattr(pool, "run_job", look)
        torch.set_num_threads(2)
        try:
            compare(tiny("h3"), tmp_path, workers=0)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(threads)
        assert during == [1]

    def test_the_command_may_be_left_out(self, tmp_path: Path) -> None:
        assert compare(tiny("h3"), tmp_path, workers=0).command == ""


class TestDevices:
    @pytest.fixture
    def four_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr("stateline.compare.pool.cores", lambda: 3)

    @pytest.mark.usefixtures("four_gpus")
    @pytest.mark.parametrize(
        ("device", "workers", "expected"),
        [
            ("cpu", None, ["cpu"] * 3),
            ("cpu", 5, ["cpu"] * 5),
            ("cpu", 0, []),
            ("cuda", None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
            ("auto", 2, ["cuda:0", "cuda:1"]),
            ("cuda", 6, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]),
            ("cuda:2", None, ["cuda:2"]),
            ("cuda:2", 2, ["cuda:2", "cuda:2"]),
        ],
    )
    def test_workers_take_gpus_in_turn(
        self, device: str, workers: int | None, expected: list[str]
    ) -> None:
        assert local(device, workers).devices == expected

    @pytest.mark.usefixtures("four_gpus")
    def test_models_may_share_a_gpu_and_a_job_may_have_threads(self) -> None:
        assert local("cuda", workers_per_gpu=2).devices == [f"cuda:{n % 4}" for n in range(8)]
        assert local("cpu", threads=3).devices == ["cpu"]
        assert local("cpu", threads=64).devices == ["cpu"]
        with pytest.raises(InputError, match="threads must be at least 1, got threads=0"):
            local("cpu", threads=0)
        with pytest.raises(
            InputError, match="workers_per_gpu must be at least 1, got workers_per_gpu=0"
        ):
            local("cpu", workers_per_gpu=0)

    def test_a_job_computes_on_the_threads_that_were_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        def run_job(*_: object, **__: object) -> Any:
            seen.append(torch.get_num_threads())
            raise KeyboardInterrupt

        monkeypatch.setattr("stateline.compare.pool.run_job", run_job)
        monkeypatch.setattr("stateline.bench.timing.cores", lambda: 3)
        options = ["--tasks", RECALL, "--protocol", "quick", "--workers", "0", "--device", "cpu"]
        for threads in ("1", "2"):
            out = ["--out", str(tmp_path / threads), "--threads", threads]
            assert main(["compare", "lstm", *options, *out]) == 130
        assert seen == [1, 2]

    @pytest.mark.usefixtures("four_gpus", "quick_speed")
    def test_everything_is_computed_on_the_device_that_was_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[torch.device] = []
        first = compare(tiny("h3"), tmp_path / "cpu", workers=0, device="cpu")

        def begin(*_: object, processes: Any, **__: object) -> Any:
            seen.append(processes.device)
            return nullcontext()

        def time_jobs(jobs: Any, folder: Path, device: torch.device, *_: object) -> Any:
            seen.append(device)
            return first.speed

        monkeypatch.setattr("stateline.compare.pool.begin", begin)
        monkeypatch.setattr("stateline.compare.pool.run_job", lambda *_: first.runs[0])
        monkeypatch.setattr("stateline.compare.time_jobs", time_jobs)
        compare(tiny("h3"), tmp_path / "gpu", workers=0, device="cuda:3")
        assert seen == [torch.device("cuda:3")] * 2


@pytest.mark.usefixtures("quick_speed")
class TestPresets:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two presets of one pattern, of sizes for a test."""
        from stateline.models.config import ModelConfig
        from stateline.models.presets import PRESETS

        one = ModelConfig("lstm", 100, 16, norm="rms")
        monkeypatch.setitem(PRESETS, "small-1m", one)  # type: ignore[arg-type]
        two = ModelConfig("lstm", 100, 24)
        monkeypatch.setitem(PRESETS, "small-2m", two)  # type: ignore[arg-type]

    def test_a_preset_keeps_its_settings_and_its_width(self) -> None:
        jobs = plan(tiny("small-1m", "h3", "small-2m", d_model=None))
        assert [job.label for job in jobs] == ["small-1m", "h3", "small-2m"]
        assert [jobs[0].model.d_model, jobs[2].model.d_model] == [16, 24]
        assert (jobs[0].model.norm, jobs[0].model.vocab_size) == ("rms", 10)
        assert jobs[1].parameters_wanted == jobs[0].parameters_wanted

    @pytest.mark.parametrize("size", [{"d_model": 12}, {"d_model": None, "parameters": 9000}])
    def test_a_size_that_is_given_holds_for_presets_too(self, size: dict[str, Any]) -> None:
        jobs = plan(tiny("h3", "small-1m", "small-2m", **size))
        assert len({job.parameters_wanted for job in jobs}) == 1

    def test_presets_of_one_pattern_are_told_apart_and_their_sizes_are_not_called_matched(
        self, tmp_path: Path
    ) -> None:
        from stateline.reports.sentences import headline

        results = compare(tiny("small-1m", "small-2m", d_model=None), tmp_path, workers=0)
        assert results.models == ["small-1m", "small-2m"]
        assert [run.model for run in results.runs] == results.models
        assert [entry.model for entry in results.speed] == results.models
        assert "2 models of different sizes" in headline(results)

    def test_a_preset_that_there_is_not_is_named(self) -> None:
        with pytest.raises(InputError, match="unknown preset 'small-3m': did you mean 'small-"):
            plan(tiny("small-3m"))


@pytest.mark.usefixtures("quick_speed")
def test_the_precision_is_that_of_training_and_tells_runs_apart(tmp_path: Path) -> None:
    results = compare(tiny("h3", precision="bfloat16"), tmp_path, workers=0)
    assert results.runs[0].training["precision"] == "bfloat16"
    assert results.speed[0].precision == "bfloat16"
    compare(tiny("h3"), tmp_path, workers=0)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert len(list((tmp_path / "speed").iterdir())) == 2


@pytest.mark.usefixtures("quick_speed")
def test_a_run_of_another_name_is_not_run_again(tmp_path: Path) -> None:
    from stateline.runs.folder import stored_run
    from stateline.runs.store import to_json, write_text

    (job,) = plan(tiny("h3"))
    first = compare(tiny("h3"), tmp_path, workers=0)
    path = tmp_path / "runs" / job.name
    write_text(path / "result.json", to_json(replace(first.runs[0], model="named")))
    assert stored_run(path).model == "named"  # type: ignore[union-attr]
    assert compare(tiny("h3"), tmp_path, workers=0).runs[0].model == "h3"
