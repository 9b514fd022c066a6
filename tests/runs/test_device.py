"""A run computes on the device that was asked for, and nowhere else: on a simulated accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.compare import Comparison, compare, plan
from stateline.train.processes import Processes
from tests.devices import watch
from tests.whole_runs import run_whole

pytestmark = pytest.mark.cpu  # each test chooses its devices

RECALL = "associative_recall(length=4, batch_size=4)"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
    monkeypatch.setattr("stateline.runs.score.SAMPLE_TOKENS", 4)


def text(folder: Path) -> str:
    (folder / "text").write_text("the quick brown fox " * 30)
    return f"text(path={folder / 'text'}, length=16, batch_size=2)"


def comparison(task: str, *patterns: str) -> Comparison:
    return Comparison(patterns or ("h3", "attention"), [task], d_model=8, steps=2, protocol="quick")


@pytest.fixture
def double() -> Iterator[None]:
    """Compute in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["recall", "text"])
def test_training_scoring_and_sampling_stay_on_the_device(tmp_path: Path, kind: str) -> None:
    task = RECALL if kind == "recall" else text(tmp_path)
    (job,) = plan(comparison(task, "h3 attention"))
    with watch() as counts:
        run = run_whole(job, tmp_path / "fake", processes=Processes(device=torch.device("fake")))
    assert counts.device
    assert counts.heavy_on_cpu == set()
    on_cpu = run_whole(job, tmp_path / "cpu")
    assert run.environment["device"] == "fake"
    # Both round differently, and Adam divides what was rounded by 1e-8 where gradients vanish.
    tolerance = torch.finfo(torch.float64).eps / 1e-8
    for length, scores in on_cpu.by_length.items():
        assert run.by_length[length] == pytest.approx(scores, rel=tolerance)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_speed")
def test_a_comparison_trains_and_times_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = torch.device("fake")
    for place in ("stateline.compare", "stateline.compare.pool"):
        monkeypatch.setattr(f"{place}.resolve_device", lambda _: fake)
    with watch() as counts:
        results = compare(comparison(RECALL), tmp_path, workers=0, device="fake")
    assert counts.device
    assert counts.heavy_on_cpu == set()
    assert [run.environment["device"] for run in results.runs] == ["fake", "fake"]
    assert [entry.device for entry in results.speed] == ["fake", "fake"]


def test_the_train_command_computes_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def join_processes(device: str) -> Iterator[Processes]:
        asked.append(device)
        yield Processes(device=torch.device("fake"))

    monkeypatch.setattr("stateline.train.processes.join_processes", join_processes)
    options = ["--task", RECALL, "--model.d_model", "8", "--train.steps", "2", "--device", "cuda:1"]
    with watch() as counts:
        assert main(["train", "h3", *options, "--out", str(tmp_path / "run")]) == 0
    assert asked == ["cuda:1"]
    assert counts.device
    assert counts.heavy_on_cpu == set()
