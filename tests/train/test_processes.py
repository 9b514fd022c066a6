"""Two processes learn what one learns, and a checkpoint does not depend on their number."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateline.errors import InputError
from stateline.train.checkpoint import found
from stateline.train.loop import ALONE
from stateline.train.metrics import METRICS
from stateline.train.processes import Processes, join_processes
from tests.train.held import held

SCRIPT = Path(__file__).with_name("several.py")
_spec = importlib.util.spec_from_file_location("several", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
several = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several)


def torchrun(home: Path, until: int) -> None:
    """Two processes train on, first with DDP, then with FSDP."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(SCRIPT), str(home), str(until)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One process throughout; and two, then one, then two again, each for three steps."""
    alone, shared = (tmp_path_factory.mktemp(name) for name in ("alone", "shared"))
    for home in (alone, shared):
        (home / "text.txt").write_bytes(bytes(97 + n * n % 23 for n in range(800)))
    several.run(alone, "ddp", 9, ALONE)
    torchrun(shared, 3)
    for mode in several.MODES:
        several.run(shared, mode, 6, ALONE)
    torchrun(shared, 9)
    return {"alone": alone / "ddp", **{mode: shared / mode for mode in several.MODES}}


def lines(folder: Path, name: str) -> dict[int, float]:
    """A column of the metrics, by step."""
    found = map(json.loads, (folder / METRICS).read_text().splitlines())
    return {line["step"]: line[name] for line in found if line[name] is not None}


@pytest.mark.slow
@pytest.mark.parametrize("mode", several.MODES)
@pytest.mark.parametrize(("what", "count"), [("loss", 9), ("metric", 3)])
@pytest.mark.slow
def test_losses_and_scores_are_those_of_one_process(
    homes: dict[str, Path], mode: str, what: str, count: int
) -> None:
    alone = lines(homes["alone"], what)
    assert len(alone) == count
    assert lines(homes[mode], what) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", several.MODES)
def test_checkpoints_hold_what_those_of_one_process_hold(homes: dict[str, Path], mode: str) -> None:
    ours, alone = (held(found(homes[name])[-1]) for name in (mode, "alone"))
    assert ours.keys() == alone.keys()
    for name, wanted in alone.items():
        assert ours[name].shape == wanted.shape
        # by norm: AdamW makes whole steps of rounding errors where a gradient is next to nothing
        error = (ours[name].double() - wanted.double()).norm()
        assert error <= 1e-3 * wanted.double().norm(), name


def test_rows_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(InputError, match="batch_size must be a multiple of the 3 processes, got 4"):
        Processes(rank=0, count=3).rows(4)


def test_every_row_goes_to_one_process() -> None:
    shares = [range(12)[Processes(rank, 3).rows(12)] for rank in range(3)]
    assert [row for share in shares for row in share] == list(range(12))


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes("cpu") as processes:
        assert (processes.rank, processes.count, processes.main) == (0, 1, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(InputError, match="device cuda was asked for, but"),
        join_processes("cuda"),
    ):
        pass
