"""``stateline train``: recipes, stopping and resuming, and what is shown before a run."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stateline.cli import main
from stateline.devices import log_bfloat16_rate
from stateline.files import sha256, write_text
from stateline.models.config import ModelConfig
from stateline.models.size import meta_model
from stateline.runs import read_results
from stateline.runs.job import Job
from stateline.train.config import TrainConfig
from stateline.train.folder import MANIFEST, RECORD, found
from stateline.train.processes import Processes

RECIPE = """
pattern: h3
task: text(path=text.txt, length=8, batch_size=2)
out: run
model: {d_model: 8, layers: {h3: {d_state: 6}}}
train: {steps: 4, log_every: 1, eval_every: 0, lr: 0.002}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe and its text, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(97 + n % 7 for n in range(400)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return "recipe.yaml"


def steps(folder: str = "run") -> list[int]:
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_the_command_for_a_folder_with_a_space_is_quoted(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--train.steps", "1", "--out", "my run"]) == 0
    assert capsys.readouterr().out.endswith("in my run: stateline generate 'my run'\n")


def test_a_folder_named_like_a_number_is_resumed(recipe: str) -> None:
    assert main(["train", recipe, "--out", "1e-3"]) == 0
    assert main(["train", "1e-3/config.yaml", "--train.steps", "6", "--resume"]) == 0
    assert steps("1e-3") == [1, 2, 3, 4, 5, 6]


def test_a_recipe_is_trained(recipe: str) -> None:
    assert main(["train", recipe]) == 0
    assert steps() == [1, 2, 3, 4]
    config = json.loads(Path("run/config.json").read_text())
    assert (config["pattern"], config["d_model"]) == ("h3", 8)
    assert config["layers"] == {"h3": {"d_state": 6}}


def test_training_goes_on_when_nobody_reads_its_output(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["train", recipe]) == 0
    assert steps() == [1, 2, 3, 4]
    assert Path("run/result.json").exists()


def test_options_override_a_recipe_and_a_recipe_the_task(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", recipe, "--train.steps", "7", "--print_config"])
    shown = capsys.readouterr().out
    assert "steps: 7" in shown
    assert "lr: 0.002" in shown  # the task's default is 0.004


def test_a_printed_recipe_is_the_same_recipe(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", recipe, "--train.steps", "7", "--print-config"])
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    main(["train", "printed.yaml", "--print-config"])
    assert capsys.readouterr().out == printed
    assert not Path("run").exists()


def test_a_run_keeps_its_recipe(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", recipe, "--train.seed", "3"])
    capsys.readouterr()
    main(["train", "run/config.yaml", "--print_config"])
    assert capsys.readouterr().out == Path("run/config.yaml").read_text()


def test_a_recipe_keeps_what_was_switched_off(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recall = [recipe, "--task", "associative_recall", "--print_config"]
    main(["train", *recall])
    assert "stop_at: 0.99" in capsys.readouterr().out  # the default of the task
    main(["train", *recall, "--train.stop_at", "null"])
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    main(["train", "printed.yaml", "--print_config"])
    assert "stop_at: null" in printed
    assert capsys.readouterr().out == printed


def test_a_run_is_not_overwritten(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", recipe])
    before = Path("run/model.safetensors").read_bytes()
    assert main(["train", recipe, "--train.seed", "1"]) == 2
    assert "run holds a run: add --resume to continue it" in capsys.readouterr().err
    assert Path("run/model.safetensors").read_bytes() == before


def send_once_it_trains(number: int) -> None:
    """Send this process a signal after the next line of metrics."""
    file = Path("run/metrics.jsonl")
    before = file.stat().st_size if file.exists() else 0

    def watch() -> None:
        while not (file.exists() and file.stat().st_size > before):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def test_a_signal_saves_and_resume_goes_on(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    long = ["train", recipe, "--train.steps", "100000", "--train.save_every", "0"]
    send_once_it_trains(signal.SIGTERM)
    assert main(long) == 128 + signal.SIGTERM
    (saved,) = found(Path("run"))
    reached = int(saved.name.removeprefix("step-"))
    assert 0 < reached < 100_000
    assert (
        f"stopped and saved after {reached} step{'s' * (reached > 1)}; continue with --resume"
        in capsys.readouterr().out
    )
    send_once_it_trains(signal.SIGINT)
    assert main([*long, "--resume"]) == 128 + signal.SIGINT
    assert f"continuing from {saved}" in capsys.readouterr().out
    assert steps()[:1] == [1]
    assert steps() == sorted(set(steps()))


def test_resume_takes_a_finished_run_on_for_more_steps(recipe: str) -> None:
    assert main(["train", recipe]) == 0
    done = steps()[-1]
    assert main(["train", recipe, "--resume", "--train.steps", str(done + 2)]) == 0
    assert steps()[-1] == done + 2
    assert f"steps: {done + 2}" in Path("run/config.yaml").read_text()
    assert read_results(Path("run")).runs[0].steps == done + 2


def test_a_run_is_not_resumed_on_another_text(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe]) == 0
    Path("text.txt").write_bytes(bytes(97 + n % 5 for n in range(400)))
    assert main(["train", recipe, "--resume", "--train.steps", "8"]) == 2
    assert "other settings: data (" in capsys.readouterr().err
    assert steps()[-1] == 4


def test_resume_without_a_run_says_so(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--resume"]) == 0
    assert "no checkpoint in run: training from the beginning" in capsys.readouterr().out


def test_resume_names_the_way_to_continue_a_run_that_is_given_by_its_folder(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe]) == 0
    assert main(["train", "run", "--task", "text(length=16)", "--resume"]) == 2
    assert "no run in runs/train to resume: to continue the run in run, train run/config.yaml" in (
        capsys.readouterr().err
    )
    assert main(["train", "run/config.yaml", "--resume"]) == 0


@pytest.mark.parametrize("option", ["--dry_run", "--print_config"])
def test_what_is_printed_in_place_of_training_is_printed_once(
    recipe: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", recipe, option]) == 0
    assert capsys.readouterr().out == ""


def test_what_is_no_run_is_not_overwritten(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/results.json").write_text("{}")
    assert main(["train", recipe]) == 2
    assert "run holds something else than a run" in capsys.readouterr().err
    assert Path("run/results.json").read_text() == "{}"


def test_a_run_that_diverged_can_be_begun_again(recipe: str) -> None:
    assert main(["train", recipe, "--train.lr", "1e38", "--train.warmup_steps", "0"]) == 2
    assert main(["train", recipe]) == 0
    assert "lr: 0.002" in Path("run/config.yaml").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_that_a_run_diverged_is_told_once_when_the_processes_have_parted(
    recipe: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parted = []

    @contextmanager
    def join(device: str) -> Iterator[Processes]:
        yield Processes(rank=rank, device=torch.device(device))
        parted.append(rank)

    monkeypatch.setattr("stateline.train.processes.join_processes", join)
    diverging = ["--train.lr", "1e38", "--train.warmup_steps", "0", "--device", "cpu"]
    assert main(["train", recipe, *diverging]) == 2
    assert parted == [rank]
    assert capsys.readouterr().err.count("the loss became") == (rank == 0)


def test_learned_positions_must_reach_to_all_scores(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--model.max_len", "31"]) == 2
    assert "at up to 32 tokens" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main(["train", recipe, "--model.max_len", "32"]) == 0


def test_a_state_that_cannot_be_carried_leaves_nothing(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--train.carry_state", "true", "--pattern", "attention"]) == 2
    assert "the state of this model grows with the length" in capsys.readouterr().err
    assert not Path("run").exists()


def test_an_interrupted_run_generates_text(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    send_once_it_trains(signal.SIGTERM)
    main(["train", recipe, "--train.steps", "100000", "--train.save_every", "0"])
    capsys.readouterr()
    assert main(["generate", "run", "--prompt", "abc", "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("abc")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_all_processes_log_is_told_by_the_main_one(
    recipe: str, rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", rank)
    log_bfloat16_rate.cache_clear()
    with caplog.at_level(logging.INFO, logger="stateline"):
        assert main(["train", recipe, "--train.precision", "bfloat16", "--device", "cpu"]) == 0
    assert ("this processor multiplies in bfloat16" in caplog.text) == (rank == "0")


def test_resume_tells_of_another_environment(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    main(["train", recipe])
    assert main(["train", recipe, "--resume"]) == 0
    assert "last bits" not in caplog.text
    (kept,) = found(Path("run"))
    record = json.loads((kept / RECORD).read_text())
    threads = record["environment"]["threads"]
    record["environment"]["threads"] = 99
    write_text(kept / RECORD, json.dumps(record))
    manifest = json.loads((kept / MANIFEST).read_text())
    manifest["sha256"][RECORD] = sha256(kept / RECORD)
    write_text(kept / MANIFEST, json.dumps(manifest))
    assert main(["train", recipe, "--resume"]) == 0
    assert "results may differ in the last bits from an uninterrupted run" in caplog.text
    assert f"threads 99 then, {threads} now" in caplog.text


def test_metrics_go_to_tensorboard(recipe: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    main(["train", recipe])
    board = EventAccumulator("run").Reload()
    wanted = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    found = board.Scalars("loss")
    assert [event.step for event in found] == [line["step"] for line in wanted]
    assert [event.value for event in found] == pytest.approx([line["loss"] for line in wanted])


def test_a_dry_run_shows_costs_and_trains_nothing(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    model = meta_model(ModelConfig("h3", 256, 8, layers={"h3": {"d_state": 6}}))
    assert f"parameters      {sum(p.numel() for p in model.parameters()):,}" in shown
    for line in ("an update       2 x 8 tokens", "activations", "optimizer", "state of a row"):
        assert line in shown
    assert "estimated for one process in float32" in shown
    assert not Path("run").exists()
    main(["train", recipe, "--dry-run", "--train.precision", "bfloat16"])
    assert "estimated for one process in bfloat16" in capsys.readouterr().out


def test_a_run_is_a_comparison_of_one(recipe: str) -> None:
    main(["train", recipe])
    results = json.loads(Path("run/results.json").read_text())
    assert results["command"] == "stateline train recipe.yaml"
    assert (results["finished"], results["models"]) == (True, ["h3"])
    (run,) = results["runs"]
    assert run == json.loads(Path("run/result.json").read_text())
    assert list(run["by_position"]) == ["1", "2", "4", "8", "16", "32"]
    assert run["sample"].startswith("defgabc")
    assert 64 < len(run["sample"]) <= 64 + 256
    run["sample"].encode()  # what is no text has been marked as such


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: text\n", "the recipe bad.yaml names no pattern"),
        ("pattern: h3\ntrain: {stepz: 3}\n", "did you mean 'train.steps'?"),
        ("pattern: h3\ntrain: {steps: many}\n", "many"),
        ("pattern: [\n", "bad.yaml"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_named(
    recipe: str, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("bad.yaml").write_text(text)
    assert main(["train", "bad.yaml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_jobs_tell_the_new_settings_apart() -> None:
    def name(**settings: int) -> str:
        return Job("text", 1, ModelConfig("h3", 256), TrainConfig(**settings)).name

    assert name() != name(accumulate=2)
