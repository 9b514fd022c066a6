"""A run that is stopped and started again ends as one that was not, to the bit."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stateline.errors import InputError
from stateline.models.checkpoint import load_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Task, Text, make_task
from stateline.train.config import TrainConfig
from stateline.train.folder import found
from stateline.train.loop import train
from stateline.train.metrics import METRICS, TrainingDiverged, TrainResult
from stateline.train.optimizer import OPTIMIZERS


def model(pattern: str = "h3 lstm") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=8))


def run(
    text: Text, folder: Path, *, until: int = 99, of: LanguageModel | None = None, **settings: Any
) -> TrainResult:
    """Train, or go on; stop after ``until`` steps in all."""
    defaults = {"steps": 8, "warmup_steps": 0, "eval_every": 0, "log_every": 1, "save_every": 3}
    config = TrainConfig(**{**defaults, **settings})
    done = [len(path.name) and int(path.name[5:]) for path in found(folder)]
    steps = iter(range(max(done, default=0) + 1, 100))
    return train(
        model() if of is None else of,
        text,
        config,
        folder=folder,
        interrupted=lambda: next(steps) >= until,
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds."""
    newest = found(folder)[-1]
    return load_file(newest / "model.safetensors") | load_file(newest / "training.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def learned(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / METRICS).read_text().splitlines())
    return [(line["step"], line["loss"], line["lr"]) for line in lines]


def test_a_finished_run_goes_on_for_more_steps_as_one_planned_for_them(
    tmp_path: Path, text: Text
) -> None:
    settings: dict[str, Any] = {"schedule": "constant", "warmup_steps": 2}
    assert run(text, tmp_path / "a", steps=5, **settings).stopped == "finished"
    longer = run(text, tmp_path / "a", steps=8, **settings)
    assert (longer.stopped, longer.steps) == ("finished", 8)
    run(text, tmp_path / "b", steps=8, **settings)
    assert same(tensors(tmp_path / "a"), tensors(tmp_path / "b"))
    assert learned(tmp_path / "a") == learned(tmp_path / "b")
    with pytest.raises(InputError, match=r"settings: steps \(8 then, 7 now\)"):
        run(text, tmp_path / "a", steps=7, **settings)


def test_a_run_of_a_compiled_model_goes_on_with_the_model(
    text: Text, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: Any = torch.compile(model(), backend="eager")
    run(text, tmp_path / "a", until=4, of=compiled)
    assert "the model inside torch.compile is trained" in caplog.text
    for folder in ("a", "b"):
        run(text, tmp_path / folder)
    assert same(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["carries", "chooses"])
def test_a_run_killed_eight_times_ends_with_the_same_bits(tmp_path: Path, which: str) -> None:
    script = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), which]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert ends == [0, *[SIGKILL] * 8, 0]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert same(tensors(whole), tensors(killed))
    assert learned(whole) == learned(killed)


@pytest.mark.parametrize("settings", [{}, {"carry_state": True, "carry_cap": 48}])
def test_an_interrupted_run_saves_and_goes_on(
    text: Text, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Also if it is interrupted between two resets of the carried states."""
    run(text, tmp_path / "whole", **settings)
    first = run(text, tmp_path / "halves", until=4, **settings)
    assert (first.stopped, first.steps) == ("interrupted", 4)
    assert run(text, tmp_path / "halves", **settings).stopped == "finished"
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "halves"))
    assert learned(tmp_path / "whole") == learned(tmp_path / "halves")


def test_a_schedule_that_ends_in_the_warm_up_is_refused_for_new_runs_alone(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"warmup_steps": 2, "schedule_steps": 2}
    with pytest.raises(InputError, match="be above the 2 updates of the warm-up, got 2: raise it"):
        run(text, tmp_path, **settings)
    with monkeypatch.context() as earlier:
        earlier.setattr("stateline.train.loop.check_schedule", lambda _: None)
        run(text, tmp_path, until=4, **settings)
    assert run(text, tmp_path, **settings).stopped == "finished"


def test_the_random_state_is_kept(text: Text, tmp_path: Path) -> None:
    made = model()
    run(text, tmp_path, until=4, of=made)
    wanted = torch.rand(3)
    run(text, tmp_path, until=5, of=made)  # one step that draws nothing
    assert torch.rand(3).equal(wanted)


def test_the_newest_checkpoints_are_kept(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, keep=2)
    assert [path.name for path in found(tmp_path)] == ["step-00000006", "step-00000008"]


def test_a_checkpoint_is_a_model(text: Text, tmp_path: Path) -> None:
    trained = model()
    run(text, tmp_path, of=trained)
    kept = load_model(found(tmp_path)[-1])
    tokens = text.train_batch(0).tokens
    assert kept(tokens).equal(trained.to("cpu")(tokens))


def test_a_finished_run_trains_no_more(text: Text, tmp_path: Path) -> None:
    first, second = (run(text, tmp_path) for _ in range(2))
    assert first == second


def test_a_solved_run_trains_no_more(text: Text, tmp_path: Path) -> None:
    first, second = (run(text, tmp_path, eval_every=2, stop_at=99.0) for _ in range(2))
    assert (first.stopped, first.steps) == ("solved", 2)
    assert first == second


def test_lines_after_the_checkpoint_are_taken_back(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, until=4)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5, "steps": 8, "lo')
    run(text, tmp_path)
    assert [step for step, _, _ in learned(tmp_path)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"step-00000004 comes .* settings: lr \(0.001 then, 0.5 now\)"),
        ({"steps": 7}, r"other settings: steps \(8 then, 7 now\)"),
        ({"of": model("h3")}, r"other settings: pattern \(h3 lstm then, h3 now\)"),
    ],
)
def test_another_run_does_not_go_on(
    text: Text, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run(text, tmp_path, until=4)
    before = tensors(tmp_path)
    with pytest.raises(InputError, match=message):
        run(text, tmp_path, **change)
    assert same(before, tensors(tmp_path))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda text: Text(1, path=text.path, length=16, batch_size=4), "Text"),
        (lambda text: Text(path=text.path, length=8, batch_size=4), "Text"),
        (lambda _: make_task("copying"), "Copying"),
    ],
    ids=["seed", "length", "kind"],
)
def test_a_run_of_another_task_does_not_go_on(
    text: Text, tmp_path: Path, other: Callable[[Text], Task], told: str
) -> None:
    config = TrainConfig(steps=2, warmup_steps=0, eval_every=0)
    train(model(), text, config, folder=tmp_path)
    with pytest.raises(InputError, match=rf"other settings: task \(Text \w+ then, {told} \w+ now"):
        train(model(), other(text), config, folder=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"save_every": 1, "keep": 5}, {"checkpoint_activations": True, "loss_chunk": 3}],
    ids=["saves", "memory"],
)
def test_what_does_not_change_the_outcome_may_change(
    text: Text, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run(text, tmp_path, until=4)
    assert run(text, tmp_path, **settings).stopped == "finished"


def test_what_a_kill_left_behind_is_removed(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, until=4)
    (tmp_path / "checkpoints" / ".step-00000006.new").mkdir()
    run(text, tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]


def test_lines_without_a_norm_of_the_gradient_are_read(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, until=3)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert all(line.pop("gradient_norm") > 0 for line in lines)
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = run(text, tmp_path).curve
    assert [point.gradient_norm is None for point in curve] == [True] * 3 + [False] * 5


def test_a_line_of_metrics_that_is_none_is_named(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, until=4)
    lines = (tmp_path / METRICS).read_text().splitlines()
    (tmp_path / METRICS).write_text("\n".join(["{", *lines[1:]]))
    with pytest.raises(InputError, match=r"line 1 of .*metrics.jsonl is not a line of metrics"):
        run(text, tmp_path)


def test_a_run_whose_score_is_no_number_goes_on(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> dict[str, float]:
        return {text.metric: math.nan}

    monkeypatch.setattr("stateline.train.loop.evaluate", unknown)
    run(text, tmp_path, until=4, eval_every=1)
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["metric"] for line in lines] == [None] * 4
    assert len(run(text, tmp_path, eval_every=1).curve) == 8


def test_how_processes_share_may_change(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path, until=4)
    assert run(text, tmp_path, parallel="fsdp").stopped == "finished"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize("name", ["training.json", "training.safetensors", "model.safetensors"])
@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda file: file.write_bytes(b"{}")])
def test_a_damaged_checkpoint_is_named_with_the_way_out(
    text: Text, tmp_path: Path, name: str, harm: Callable[[Path], object]
) -> None:
    run(text, tmp_path, until=4)
    harm(found(tmp_path)[-1] / name)
    with pytest.raises(InputError, match=r"step-00000004 is damaged: .*remove it to go on"):
        run(text, tmp_path)


def test_an_older_checkpoint_serves_when_the_newest_is_removed(text: Text, tmp_path: Path) -> None:
    run(text, tmp_path / "whole")
    run(text, tmp_path / "again", until=7)
    newest = found(tmp_path / "again")[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    run(text, tmp_path / "again")
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "again"))


def test_a_full_disk_leaves_the_older_checkpoints(
    text: Text, tmp_path: Path, full_disk: Callable[[int], Any]
) -> None:
    run(text, tmp_path, until=4)
    before = tensors(tmp_path)
    with full_disk(4000), pytest.raises(InputError, match=r"cannot write .*step-00000006: "):
        run(text, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        "step-00000003",
        "step-00000004",
    ]
    assert same(before, tensors(tmp_path))


def test_a_run_that_diverges_names_its_last_good_checkpoint(text: Text, tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"the last good checkpoint is .*step-00000001$"):
        run(text, tmp_path, lr=1e37, clip=0.0, save_every=1)
    (good,) = found(tmp_path)
    assert all(t.isfinite().all() for t in load_file(good / "model.safetensors").values())


@pytest.mark.cpu
def test_weights_that_are_no_numbers_are_not_kept(text: Text, tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"a weight or its moments became .* at step 1"):
        run(text, tmp_path, lr=1e38, weight_decay=10.0, save_every=1)
    assert not found(tmp_path)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_a_run_with_another_optimizer_goes_on_to_the_bit(
    text: Text, tmp_path: Path, optimizer: str
) -> None:
    run(text, tmp_path / "whole", optimizer=optimizer)
    run(text, tmp_path / "halves", until=4, optimizer=optimizer)
    run(text, tmp_path / "halves", optimizer=optimizer)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "halves"))
    with pytest.raises(InputError, match="settings: optimizer"):
        run(text, tmp_path / "halves")


@pytest.mark.parametrize("refused", ["step-00000006", ".step-00000003"])
def test_a_rename_that_fails_is_one_error_and_leaves_a_whole_checkpoint(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """A new checkpoint cannot get its name, or an old one cannot be removed."""
    run(text, tmp_path, until=4)
    replace = os.replace

    def refusing(source: Path, target: Path) -> None:
        if Path(target).name == refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(InputError, match=r"cannot write .*step-00000006: Input/output error; "):
        run(text, tmp_path)
    monkeypatch.undo()
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    newest = ["step-00000006"] if refused.startswith(".") else []
    assert sorted(names) == ["step-00000003", "step-00000004", *newest]
    run(text, tmp_path)
    run(text, tmp_path.with_name("whole"))
    assert same(tensors(tmp_path), tensors(tmp_path.with_name("whole")))
