"""A command with ``--device`` computes there and nowhere else: on a simulated accelerator."""

import re
import shlex
from pathlib import Path

import pytest

from stateline import devices
from stateline.cli import main
from stateline.models.checkpoint import save_model
from stateline.models.language_model import LanguageModel
from stateline.tasks import make_task
from tests.devices import watch

TASK = "copying(n_letters=3, max_len=3, context_len=12, batch_size=2)"
COMMANDS = [
    f"train 'h3 attention' --task '{TASK}' --model.d_model 8 --train.steps 2 --out new",
    pytest.param(
        f"compare h3 attention --tasks '{TASK}' --d_model 8 --steps 2 --workers 0 "
        "--protocol quick --out new",
        marks=pytest.mark.slow,
    ),
    "generate run --prompt '1 2' --max_new_tokens 2",
    "evaluate run text",
    pytest.param(f"capacity run --task '{TASK}' --batches 1 --length 2", marks=pytest.mark.slow),
    pytest.param(
        "bench layers --patterns h3 --d_model 8 --lengths 8 --seconds 0.01 --backends torch "
        "--force",
        marks=pytest.mark.slow,
    ),
]
NAMES = ["train", "compare", "generate", "evaluate", "capacity", "bench"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and a text, on a machine that has the device ``fake``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "_NAME", re.compile("auto|cpu|fake"))
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)
    (tmp_path / "text").write_text("1 2 3 " * 30)
    save_model(LanguageModel(make_task(TASK).model_config("h3 attention", {"d_model": 8})), "run")
    return tmp_path


@pytest.mark.usefixtures("folder", "quick_speed")
@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_a_command_computes_on_its_device_alone(command: str) -> None:
    with watch() as counts:
        assert main([*shlex.split(command), "--device", "fake"]) == 0
    assert counts.device
    assert counts.heavy_on_cpu == set()
