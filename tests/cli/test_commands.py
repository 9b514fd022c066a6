import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.capacity import ScoreByBits, measure
from stateline.cli import main
from stateline.generate import generate
from stateline.layers import LAYERS, FeedForward
from stateline.layers.law import check_layer
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters
from stateline.ops import OPS
from stateline.reports.format import DASH
from stateline.tasks import Copying, make_task

COPYING = "copying(n_letters=3, max_len=3, context_len=12, batch_size=2)"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copying, "problems_per_batch", 4)
    monkeypatch.setattr("stateline.runs.score.EVAL_BATCHES", 1)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def train(folder: Path, pattern: str = "attention(n_heads=2)", *more: str) -> list[str]:
    arguments = ["train", pattern, "--task", COPYING, "--out", str(folder)]
    return [*arguments, "--train.steps", "3", "--model.d_model", "8", *more]


class TestCapacity:
    def test_the_longest_string_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = said(capsys, "capacity", "lstm", "--d_model", "8")
        assert "always fits: 108 letters" in shown  # 2 * 8 * 32 / log2(26)

    def test_a_cache_rules_no_length_out(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "the bound excludes no length" in said(
            capsys, "capacity", "attention", "--d_model", "8"
        )

    def test_the_state_of_a_run_is_rounded(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said(capsys, *train(tmp_path))
        shown = said(capsys, "capacity", str(tmp_path), "--batches", "1", "--length", "2")
        assert "string accuracy at 2" in shown
        assert "exact state" in shown

    def test_or_it_is_blurred(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        said(capsys, *train(tmp_path))
        shown = said(capsys, "capacity", str(tmp_path), "--batches", "1", "--noise")
        assert "string accuracy at 3, with noise" in shown
        numbers = measure(load_model(tmp_path), make_task(COPYING), 3, bits=(), batches=1).numbers
        (row,) = (line.split() for line in shown.splitlines() if line.startswith("0 "))
        assert row[1] == str(numbers)  # noise as wide as the range lets one bit of each through

    @pytest.mark.parametrize(
        ("whole", "by_bits", "verdict"),
        [
            (0.0, {0: 0.0, 1: 0.0}, "does not solve the task (a guess scores 0.000), so its"),
            (0.05, {0: 0.0, 1: 0.05}, "does not solve the task"),
            (0.5, {0: 0.46, 1: 0.5}, "Without the state, the score falls by at most 0.05."),
            (0.5, {0: 0.0, 1: 0.46}, "1 bit per state entry suffices: 7 bits in 7 entries."),
            (0.5, {0: 0.0, 1: 0.4}, "No number of bits tried suffices."),
        ],
    )
    def test_what_the_scores_tell_is_said(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        whole: float,
        by_bits: dict[int, float],
        verdict: str,
    ) -> None:
        said(capsys, *train(tmp_path))
        found = ScoreByBits(7, whole, by_bits)
        monkeypatch.setattr("stateline.capacity.measure", lambda *_, **__: found)
        monkeypatch.setattr(Copying, "chance", lambda _: 0.0)
        shown = said(capsys, "capacity", str(tmp_path))
        assert verdict in " ".join(shown.split())

    def test_lengths_beyond_learned_positions_have_no_state(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = said(capsys, "capacity", "attention", "--d_model", "8", "--max_len", "40")
        (state,) = (line.split() for line in shown.splitlines() if line.startswith("   all"))
        (fails,) = (line.split() for line in shown.splitlines() if line.startswith("copying fails"))
        assert state[2:] == [DASH] * 6
        assert fails[-7:] == ["0", *["1"] * 6]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["lstm", "--n_letters", "1"], "n_letters must be at least 2, got 1"),
            (["RUN", "--task", "copying"], "the task has 30 tokens and the model 7"),
            (["RUN", "--task", "flip_flop"], "answered by decoding, such as copying"),
            (
                ["lstm", "--length", "5"],
                "--length can be given only for the folder of a trained run",
            ),
            (["runs/none"], "no model in runs/none: there is no such folder here; give"),
        ],
    )
    def test_mistakes_are_one_line(
        self,
        options: list[str],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        said(capsys, *train(tmp_path))
        assert main(["capacity", *(str(tmp_path) if o == "RUN" else o for o in options)]) == 2
        assert message in capsys.readouterr().err

    def test_no_option_is_ignored_where_the_task_of_a_run_is_not_decoded(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said(capsys, *train(tmp_path, "lstm", "--task", "word_problem(length=4)"))
        assert main(["capacity", str(tmp_path), "--length", "5", "--noise"]) == 2
        message = "--length, --noise can be given only with a task that is answered by decoding"
        assert message in capsys.readouterr().err


class TestTrain:
    def test_the_run_has_its_model_metrics_and_result(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = said(capsys, *train(tmp_path))
        names = {"config.json", "metrics.jsonl", "model.safetensors", "result.json"}
        names |= {"config.yaml", "hashes.json", "results.json", "checkpoints"}
        written = {path.name for path in tmp_path.iterdir()}
        assert {name for name in written if not name.startswith("events.")} == names
        assert f"the model is in {tmp_path}: stateline generate {tmp_path}" in shown
        config = ModelConfig("attention(n_heads=2)", vocab_size=7, d_model=8)
        assert load_model(tmp_path).config == config
        assert f"{count_parameters(config):,} parameters, finished" in shown

    def test_scores_are_printed_at_every_length(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = said(capsys, *train(tmp_path))
        for length in (3, 4, 6, 9, 12):
            assert f"  at length {length}: string_accuracy " in shown

    def test_settings_are_those_of_the_task_unless_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said(capsys, *train(tmp_path, "h3", "--train.clip", "2"))
        training = json.loads((tmp_path / "result.json").read_text())["training"]
        assert {**training, **Copying.training, "steps": 3, "clip": 2.0} == training

    def test_a_seed_gives_the_same_model_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
            said(capsys, *train(tmp_path / name, "h3", "--train.seed", seed))
        a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
        assert a == b != c

    def test_training_that_diverges_is_a_mistake_of_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        diverging = ["--train.lr", "1e38", "--train.warmup_steps", "0"]
        assert main(train(tmp_path, "h3", *diverging)) == 2
        error = capsys.readouterr().err
        assert error.startswith("stateline: error: the loss became nan at step 2: lower lr")
        assert len(error.splitlines()) == 1


class TestGenerate:
    def test_it_prints_the_tokens_that_the_model_gives(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said(capsys, *train(tmp_path))
        greedy = ["--prompt", "3 0 1 4", "--temperature", "0", "--max_new_tokens", "6"]
        shown = said(capsys, "generate", str(tmp_path), *greedy)
        wanted = generate(load_model(tmp_path), torch.tensor([[3, 0, 1, 4]]), 6)[0].tolist()
        assert [int(number) for number in shown.split()] == wanted

    def test_a_model_of_bytes_goes_on_with_text(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = tmp_path / "text"
        text.write_text("ab" * 400)
        task = ["--task", f"text(path={text}, length=16, batch_size=4)"]
        learning = ["--train.steps", "60", "--train.warmup_steps", "0", "--model.d_model", "8"]
        said(capsys, "train", "h3", *task, *learning, "--out", str(tmp_path / "run"))
        greedy = ["--prompt", "abab", "--temperature", "0", "--max_new_tokens", "6"]
        assert said(capsys, "generate", str(tmp_path / "run"), *greedy) == "ababababab\n"

    def test_bytes_that_are_no_text_are_shown_as_such(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "text").write_text("é" * 400)
        task = ["--task", f"text(path={tmp_path / 'text'}, length=16, batch_size=4)"]
        said(capsys, "train", "h3", *task, "--train.steps", "1", "--out", str(tmp_path / "run"))
        latin_1 = "é\udce9t"  # as Python gives arguments that are not UTF-8
        none_new = ["--prompt", latin_1, "--max_new_tokens", "0"]
        assert said(capsys, "generate", str(tmp_path / "run"), *none_new) == "é\ufffdt\n"
        random = ["--prompt", "é", "--temperature", "100", "--max_new_tokens", "40"]
        assert "\ufffd" in said(capsys, "generate", str(tmp_path / "run"), *random)


def test_info_tells_parameters_operations_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"d_model": 16, "tie_embeddings": False, "norm": "rms"}
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    shown = said(capsys, "info", "attention h3", "--vocab_size", "50", *options)
    wanted = count_parameters(ModelConfig("attention h3", 50, **settings))
    (total,) = [line for line in shown.splitlines() if line.split()[:1] == ["all"]]
    assert total.split() == ["all", f"{wanted:,}"]
    (attention,) = [line for line in shown.splitlines() if " Attention " in line]
    # 4 d^2 + d parameters (with the norm), 2 d floats per token, and the length
    assert attention.split()[2:] == ["1,040", "136", "B", "8", "MiB"]


def test_info_and_capacity_show_the_model_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "pattern: h3 attention\ntask: tokens(path=nowhere)\n"
        "model: {d_model: 16, layers: {h3: {d_state: 4}}}\n"
    )
    layers = {"h3": {"d_state": 4}}
    wanted = count_parameters(ModelConfig("h3 attention", 50, 16, layers=layers))
    shown = said(capsys, "info", str(recipe), "--vocab_size", "50")
    assert f"{wanted:,}" in shown
    whole = said(capsys, "capacity", str(recipe))
    assert whole == said(capsys, "capacity", "h3(d_state=4) attention", "--d_model", "16").replace(
        "h3(d_state=4) attention", "h3 attention"
    )


def test_info_refuses_the_recipe_of_a_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "rows.yaml"
    recipe.write_text("pattern: s4d\ntask: signals(path=x)\nmodel: {pooling: last}\n")
    assert main(["info", str(recipe)]) == 2
    assert "makes a classifier, which is not shown" in capsys.readouterr().err


def test_info_knows_published_models(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "info", "mamba-130m")
    assert "mamba*24  d_model 768, vocabulary 50280" in shown
    assert "129,135,360" in shown


def test_options_override_what_a_published_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "info", "h3-125m", "--vocab_size", "96", "--d_model", "24")
    assert "h3*6 attention h3*5  d_model 24, vocabulary 96" in shown


def test_info_folds_repeated_layers_and_shows_several_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = said(capsys, "info", "h3-125m", "(lstm*2 s4d)*3", "--dtype", "bfloat16").splitlines()
    folds = [line.split()[:3] for line in shown if " x" in line and "Forward" not in line]
    assert folds == [
        ["0-11", "H3", "x6"],
        ["14-23", "H3", "x5"],
        ["0-11", "LSTM", "x3"],
        ["0-11", "LSTM", "x3"],
        ["0-11", "S4D", "x3"],
    ]


def test_info_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "info", "mamba-130m", "lstm", "--json", "--dtype", "bfloat16")
    mamba, lstm = json.loads(shown)
    assert (mamba["pattern"], mamba["vocab_size"], mamba["parameters"]) == (
        "mamba*24",
        50_280,
        129_135_360,
    )
    assert (lstm["pattern"], lstm["vocab_size"], len(lstm["layers"])) == ("lstm", 256, 1)
    assert mamba["state_bytes"]["256"] == mamba["state_bytes"]["65536"]
    assert lstm["weight_bytes"] < 4 * lstm["parameters"]
    assert lstm["device_bytes"] > 0


def test_info_tells_the_settings_of_layers_that_the_pattern_does_not_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"n_heads": 2, "position": "rope"}
    config = ModelConfig("attention lstm", 8, d_model=16, layers={"attention": heads})
    save_model(LanguageModel(config), tmp_path / "model")
    shown = said(capsys, "info", str(tmp_path / "model"))
    assert "settings: attention(n_heads=2, position=rope)\n" in shown
    assert "settings" not in said(capsys, "info", "attention lstm")


def test_info_tells_costs_at_given_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "info", "attention", "--lengths", "2000", "--json")
    (found,) = json.loads(shown)
    assert [*found["flops_per_token"]] == [*found["state_bytes"]] == ["2000"]
    assert [*found["layers"][0]["state_bytes"]] == ["1", "2000"]
    assert main(["info", "attention", "--lengths", "0"]) == 2
    assert "lengths must be at least 1" in capsys.readouterr().err


def test_info_tells_the_costs_of_layers_without_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(said(capsys, "info", "s4d bidirectional(h3)", "--json"))
    assert set(found["state_bytes"].values()) == {0}
    causal, _, both, _ = (set(layer["state_bytes"].values()) for layer in found["layers"])
    assert both == {0}
    assert 0 not in causal


def test_info_tells_the_state_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["h3", "attention"]
    own, half = (
        [found["state_bytes"]["256"] for found in json.loads(said(capsys, *command))]
        for command in (
            ["info", *models, "--json"],
            ["info", *models, "--json", "--state_dtype", "bfloat16"],
        )
    )
    position = 8  # bytes, which stay
    assert half == [(own[0] - position) // 2 + position, own[1]]


@pytest.mark.parametrize("pattern", ["h3*9999", "ladder(h3*9999)*9999", "ladder(" * 60])
def test_info_refuses_what_is_too_large(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", pattern]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_published_model_can_be_trained_anew(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--task", "copying", "--model.d_model", "64", "--print_config"]
    lines = [line.strip() for line in said(capsys, "train", "pythia-70m", *options).splitlines()]
    for line in (
        "pattern: attention*6",
        "d_model: 64",
        "block: parallel",
        "position: rope(fraction=0.25)",
    ):
        assert line in lines


class Leaky(FeedForward):
    """Sees one token ahead."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(-1, dims=-2))


class TestCheck:
    def test_a_layer_that_keeps_the_law_is_fine(self, capsys: pytest.CaptureFixture[str]) -> None:
        shown = said(capsys, "check", "h3", "--d_model", "4")
        assert "h3: the law holds" in shown
        assert "1 checked, all hold" in shown

    def test_a_layer_that_breaks_it_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(LAYERS, "leaky", Leaky)  # type: ignore[arg-type]
        shown = said(capsys, "check", "lstm", "leaky", "--d_model", "4", code=1)
        assert "leaky: THE LAW IS BROKEN" in shown
        assert "lstm: the law holds" in shown
        assert "2 checked, broken: leaky" in shown

    def test_lengths_and_seed_of_the_input_can_be_chosen(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given: dict[str, Any] = {}

        def check(layer: Any, **options: Any) -> Any:
            given.update(options)
            return check_layer(layer, **options)

        monkeypatch.setattr("stateline.layers.law.check_layer", check)
        line = "check feed_forward --d_model 4 --length 20 --chunks 4 2 --seed 3"
        said(capsys, *shlex.split(line))
        assert (given["length"], given["chunks"], given["seed"]) == (20, [4, 2], 3)

    def test_the_backend_of_every_op_is_told_within_80_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        lines = said(capsys, "check", "--backends").splitlines()
        assert [line.split()[0] for line in lines[5:] if not line.startswith(" ")] == sorted(OPS)
        assert max(map(len, lines)) <= 80


@pytest.mark.usefixtures("quick_speed", "one_process")
class TestCompare:
    def compare(self, folder: Path) -> list[str]:
        options = ["--d_model", "8", "--steps", "3", "--protocol", "quick"]
        options += ["--out", str(folder / "run")]
        return ["compare", "h3", "lstm(n_layers=1)", "--tasks", f"{COPYING}*2", *options]

    def test_it_prints_a_table_writes_a_report_and_the_recorded_command_continues_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = said(capsys, *self.compare(tmp_path))
        for told in ("4/4 ", "seed 1", "lstm(n_layers=1)", "Copying", "parameters", "state"):
            assert told in shown
        for name in ("report.html", "results.json"):
            assert (tmp_path / "run" / name).stat().st_size > 1000
            assert str(tmp_path / "run" / name) in shown
        recorded = json.loads((tmp_path / "run" / "results.json").read_text())["command"]
        program, *arguments = shlex.split(recorded)
        assert (program, arguments) == ("stateline", self.compare(tmp_path))
        assert "4 runs, 4 of them done before" in said(capsys, *arguments)

    def test_ctrl_c_is_no_traceback(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("stateline.compare.pool.run_job", interrupt)
        assert main(self.compare(tmp_path)) == 130
        error = capsys.readouterr().err.strip()
        assert error == "stateline: interrupted; finished work is kept"

    def test_a_term_signal_ends_a_command_as_ctrl_c_does(self) -> None:
        program = """if True:
            import os, signal, sys
            import stateline.cli.info
            from stateline.cli import main

            stateline.cli.info.run = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
            sys.argv = ["stateline", "info", "lstm"]
            sys.exit(main())
        """
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 143
        assert done.stderr.strip() == "stateline: interrupted; finished work is kept"

    def test_a_term_signal_after_the_work_is_no_traceback(self) -> None:
        """As torchrun sends it when another process has ended."""
        program = """if True:
            import atexit, os, signal, sys
            from stateline.cli import main

            atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
            sys.argv = ["stateline", "--version"]
            sys.exit(main())
        """
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGTERM
        assert done.stderr == ""
