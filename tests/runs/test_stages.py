"""A transformer becomes a hybrid in stages, each a run that can go on."""

import dataclasses
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from stateline.cli import main
from stateline.errors import InputError
from stateline.models.checkpoint import load_any, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters
from stateline.reports import merge
from stateline.reports.sentences import headline
from stateline.runs import stages
from stateline.runs.folder import read_results
from stateline.runs.stages import (
    RATES,
    Distilling,
    Stage,
    default_timing,
    read_stages,
    scored_tokens,
)
from stateline.runs.stages import TASK as TASK_STAGE
from stateline.tasks import make_task
from stateline.train.config import TrainConfig

TASK = "copying(max_len=5, batch_size=4)"
OLD = "attention(position=rope)*2"
NEW = "attention(position=rope) gated_delta_net(expand_v=1)"
STAGES = "mixing(steps=2) outputs(steps=2, in_turn=true) logits(steps=2) task(steps=1)"
FOLDERS = ["1-mixing", "2-outputs-layer-1", "3-logits", "4-task"]


def make_teacher(path: Path) -> None:
    torch.manual_seed(0)
    save_model(LanguageModel(make_task(TASK).model_config(OLD, {"d_model": 16})), path)


def distilled(folder: Path, *more: str, teacher: str = "teacher", pattern: str = NEW) -> int:
    command = ["distill", teacher if ":" in teacher else str(folder / teacher)]
    command += ["--pattern", pattern, "--train.warmup_steps", "0", "--train.eval_every", "0"]
    return main([*command, "--timing", "none", "--device", "cpu", *more])


def arguments(folder: Path, stages: str = STAGES) -> list[str]:
    return ["--task", TASK, "--stages", stages, "--out", str(folder / "out")]


@pytest.mark.slow
def test_every_stage_is_a_run_and_a_second_start_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_teacher(tmp_path / "teacher")
    assert distilled(tmp_path, *arguments(tmp_path)) == 0
    out = tmp_path / "out"
    assert [name for name in FOLDERS if (out / name / "result.json").exists()] == FOLDERS
    weights = [load_any(out / name).state_dict() for name in FOLDERS]
    first = load_any(tmp_path / "teacher").state_dict()
    name = "stack.layers.0.layer.qkv.weight"
    assert [own[name].equal(first[name]) for own in weights] == [True, True, False, False]
    results = read_results(out)
    assert results.models == ["teacher", NEW]
    teacher, student = results.runs
    assert (teacher.steps, student.steps) == (0, 7)
    score = teacher.by_length[5]["string_accuracy"]
    assert f"at length 5; its teacher: {score:.3f}. 2 models" in headline(results)
    assert all(run.by_position or run.by_length for run in results.runs)
    states = [entry.state_bytes[4096] for entry in results.speed]
    assert states[1] < 0.6 * states[0]
    assert "report.html" in capsys.readouterr().out

    monkeypatch.setattr(stages, "run_single", None)
    assert distilled(tmp_path, *arguments(tmp_path)) == 0
    assert capsys.readouterr().out.count("done before") == len(FOLDERS)
    twice = merge({"a": results, "b": results})
    assert [model for model in twice.models if "teacher" in model] == ["teacher"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "stage", "what"),
    [("teacher", "1-logits", "model"), ("out/1-logits", "2-task", "model")],
)
def test_a_stage_that_began_from_other_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str, stage: str, what: str
) -> None:
    make_teacher(tmp_path / "teacher")
    given = arguments(tmp_path, "logits(steps=2) task(steps=1)")
    assert distilled(tmp_path, *given) == 0
    model = load_any(tmp_path / changed)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    save_model(model, tmp_path / changed)
    capsys.readouterr()
    assert distilled(tmp_path, *given) == 2
    said = capsys.readouterr().err
    assert f"{stage} has begun from another {what} than it would now" in said


@pytest.mark.cpu
@pytest.mark.slow
def test_two_processes_share_one_corpus_and_learn_what_one_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_model(LanguageModel(ModelConfig(OLD, vocab_size=256, d_model=16)), tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("a text of a few words. " * 200)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    weights = []
    for processes in ([], launch):
        out = tmp_path / f"out{len(weights)}"
        command = ["-m", "stateline", "distill", str(tmp_path / "teacher"), "--pattern", NEW]
        command += ["--text", str(tmp_path / "text.txt"), "--length", "16", "--batch_size", "4"]
        command += ["--stages", "outputs(steps=2) logits(steps=2)", "--train.warmup_steps", "0"]
        command += ["--timing", "none", "--device", "cpu", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, *processes, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        weights.append(load_any(out / "2-logits").state_dict())
    alone, shared = weights
    for name, weight in alone.items():
        torch.testing.assert_close(shared[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.cpu
@pytest.mark.slow
def test_a_teacher_of_transformers_gives_the_logits_of_ours(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vocab_size = make_task(TASK).vocab_size
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab_size}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    pattern = "attention(position=rope, n_kv_heads=2) gated_delta_net(d_key=4, expand_v=1)"
    losses = []
    for spec in (str(tmp_path / "llama"), f"hf:{tmp_path / 'llama'}"):
        out = tmp_path / f"out{len(losses)}"
        more = ["--task", TASK, "--stages", "logits(steps=2, log_every=1)", "--out", str(out)]
        assert distilled(tmp_path, *more, teacher=spec, pattern=pattern) == 0
        losses.append([point.loss for point in read_results(out).runs[1].curve])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("begins", [True, False])
def test_a_teacher_that_expects_a_token_before_each_text_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    save_model(LanguageModel(ModelConfig(OLD, vocab_size=257, d_model=16)), tmp_path / "teacher")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    made.save(str(tmp_path / "teacher" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a text of a few words. " * 200)
    text = ["--text", str(tmp_path / "text.txt"), "--length", "16", "--batch_size", "4"]
    assert distilled(tmp_path, *text, *arguments(tmp_path, "outputs(steps=1)")[2:]) == 0
    assert ("expects a token before each text" in caplog.text) == begins


@pytest.mark.slow
def test_a_signal_stops_between_scores_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_teacher(tmp_path / "teacher")
    given, signals = arguments(tmp_path, "logits(steps=1)"), iter([True, False, True])

    def sample(*_: object) -> None:
        if next(signals, False):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("stateline.runs.train.sample_text", sample)
    found = [tmp_path / "out" / name / "result.json" for name in ("teacher", "1-logits")]
    for done in range(2):
        assert distilled(tmp_path, *given) == 128 + signal.SIGTERM
        assert [path.exists() for path in found] == [bool(done), False]
    said = capsys.readouterr().out
    assert said.count("stopped and saved") == 2
    assert "no checkpoint" not in said
    assert distilled(tmp_path, *given) == 0
    assert f"continuing from {tmp_path / 'out' / '1-logits'}" in capsys.readouterr().out
    assert all(run.by_length for run in read_results(tmp_path / "out").runs)


def test_stages_are_read_with_their_settings() -> None:
    assert read_stages(STAGES) == [
        Stage("mixing", {"steps": 2}),
        Stage("outputs", {"steps": 2}, in_turn=True),
        Stage("logits", {"steps": 2}),
        Stage("task", {"steps": 1}),
    ]
    for text, message in (
        ("logit", "logit"),
        ("logits(teacher=x)", "teacher"),
        ("logits(in_turn=true)", "in_turn is true or false, and for stages that train single"),
        ("outputs(h3)", "a stage has settings alone"),
    ):
        with pytest.raises(InputError, match=message):
            read_stages(text)


def plan_of(folder: Path, text: str, **train: float) -> Distilling:
    task, teacher = make_task(TASK), str(folder / "teacher")
    return Distilling(teacher, NEW, TASK, task, read_stages(text), train, {}, folder / "out")


@pytest.mark.parametrize("stage", RATES)
def test_a_stage_without_a_rate_has_its_own_and_not_the_rate_of_its_task(
    tmp_path: Path, stage: str
) -> None:
    make_teacher(tmp_path / "teacher")

    def rate(text: str, **train: float) -> float:
        return next(plan_of(tmp_path, text, **train).steps()).job.training.lr

    assert rate(f"{stage}(steps=9)") == RATES[stage] != make_task(TASK).training["lr"]
    assert rate(stage, lr=0.5) == 0.5
    assert rate(f"{stage}(lr=0.2)", lr=0.5) == 0.2


def test_a_student_may_have_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_teacher(tmp_path / "teacher")
    plan = plan_of(tmp_path, "logits")
    for name, label in (("", NEW), ("short", "short")):
        job = next(dataclasses.replace(plan, name=name).steps()).job
        assert (job.label, job.model.pattern) == (label, NEW)
    assert distilled(tmp_path, *arguments(tmp_path), pattern=f"teacher={NEW}") == 2
    assert "a student needs another name than teacher" in capsys.readouterr().err


def test_each_loss_that_compares_with_a_teacher_is_a_stage() -> None:
    assert {*RATES} == {*get_args(get_type_hints(TrainConfig)["match"]), TASK_STAGE}


def test_settings_of_later_stages_are_checked_before_the_first_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_teacher(tmp_path / "teacher")
    assert distilled(tmp_path, *arguments(tmp_path, "outputs(steps=2) logits(lr=-1)")) == 2
    assert "wants lr to be" in capsys.readouterr().err
    assert not (tmp_path / "out" / "1-outputs").exists()


def test_scores_of_a_large_teacher_read_less_text(tmp_path: Path) -> None:
    for width in (16, 512):
        config = ModelConfig("attention", vocab_size=16_384, d_model=width)
        save_model(LanguageModel(config), tmp_path / str(width))
    assert scored_tokens(str(tmp_path / "16")) == 262_144
    assert scored_tokens(str(tmp_path / "512")) == 2**40 // count_parameters(config) < 131_072


@pytest.mark.cpu
def test_a_large_teacher_is_not_timed_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_teacher(tmp_path / "teacher")
    of = partial(default_timing, str(tmp_path / "teacher"))
    assert of(torch.device("cpu")) == "short"
    monkeypatch.setattr(stages, "count_parameters", lambda _: stages.TIMED + 1)
    assert (of(torch.device("cpu")), of(torch.device("cuda"))) == ("none", "short")


def test_a_distillation_needs_one_kind_of_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(LanguageModel(ModelConfig("lstm", 4, d_model=4)), tmp_path / "teacher")
    assert distilled(tmp_path) == 2
    assert "give either --text or --task" in capsys.readouterr().err
    assert distilled(tmp_path, "--task", TASK, "--stages", "none") == 2
    assert "stage" in capsys.readouterr().err
