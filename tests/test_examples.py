"""The examples run, at tiny size."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stateline
from stateline.compare import Comparison, compare
from stateline.compare.recipe import read_recipe
from stateline.layers import LAYERS
from stateline.layers.law import check_layer
from stateline.models.config import ModelConfig
from stateline.papers.record import read_table
from stateline.papers.table import RECIPES
from stateline.reports import read_results
from stateline.runs.job import Job
from stateline.train.config import TrainConfig
from stateline.train.optimizer import learning_rate_share
from tests.whole_runs import run_whole

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is gone after the test."""
    monkeypatch.setattr(LAYERS, "_classes", dict(LAYERS._classes))


def example(name: str) -> ModuleType:
    """An example as a module: what stands under ``__main__`` is not run."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_custom_layer_obeys_the_law() -> None:
    assert check_layer(example("custom_layer").MovingAverage(6)).ok


def test_the_custom_layer_averages() -> None:
    import torch

    layer = example("custom_layer").MovingAverage(3, slowest=4.0).double()
    x, mean = torch.randn(1, 9, 3, dtype=torch.float64), torch.zeros(3)
    memory = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)  # of a gate that is closed
    for x_t in x[0]:
        odds = memory * layer.gate(x_t).exp()
        decay = odds / (1 + odds)
        mean = decay * mean + (1 - decay) * x_t
    assert torch.allclose(layer(x)[0, -1], layer.out_proj(mean))


def test_the_custom_layer_refuses_a_memory_below_one_token() -> None:
    with pytest.raises(ValueError, match=r"slowest must be at least 1 token, got slowest=0\.5"):
        example("custom_layer").MovingAverage(3, slowest=0.5)


def test_a_state_is_forked(capsys: pytest.CaptureFixture[str]) -> None:
    example("fork_a_state").main()
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("22 tokens read, ")
    assert second.startswith("3 futures, ")
    assert third == "joined with a younger state, the branch goes on as alone: True"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_speed", "one_process")
def test_two_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("compare_two").main(tmp_path, steps=2)
    shown = capsys.readouterr().out
    assert "h3*2: 0.000 at length 10" in shown
    assert (tmp_path / "report.html").exists()


def test_starts_are_measured(tmp_path: Path) -> None:
    from stateline.models.checkpoint import save_model
    from stateline.models.language_model import LanguageModel

    save_model(LanguageModel(ModelConfig("attention(n_heads=2)*2", 256, 16)), tmp_path / "model")
    texts = [str(tmp_path / name) for name in ("valid.txt", "test.txt")]
    for number, text in enumerate(texts):
        Path(text).write_text("The quick brown fox. " * (99 + number))
    table = example("starts_table")
    options = ["--kinds", "retention", "mamba2", "--alone", "1", "--rows", "3", "--length", "40"]
    out = ["--out", str(tmp_path / "table.json")]
    table.main(table.arguments().parse_args([*texts, str(tmp_path / "model"), *options, *out]))
    rows = read_table(tmp_path / "table.json").rows
    kinds = ["none", *(f"{kind}, {way}" for kind in options[1:3] for way in ("new", "started"))]
    assert [row.label for row in rows] == [f"model, {kind}" for kind in kinds]
    assert all(len(values) == 3 for row in rows for values in row.values)


def test_layers_are_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    timed, file = example("layer_speed"), tmp_path / "speed.json"
    sizes = ["--d_model=8", "--n_heads=2", "--window=3", "--lengths", "5", "9", "--rounds=1"]
    timed.main(timed.arguments().parse_args([*sizes, "--repeats=2", f"--record={file}"]))
    record = read_table(file)
    assert record.columns == ["microseconds per token at 5", "at 9"]
    assert record.command.endswith("--window 3 --lengths 5 9 --rounds 1 --repeats 2")
    assert {row.label: len(row.values[1]) for row in record.rows} == dict.fromkeys(
        timed.PATTERNS, 2
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("at 5, 9")
    assert [line.count("(") for line in shown[1:]] == [3] * len(timed.PATTERNS)
    assert "( 1.00)" in shown[1]


@pytest.mark.slow
def test_equal_models_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    timed = example("equal_models")
    sizes = ["--d_model=8", "--pattern=lstm", "--lengths=8", "--trials=2", "--seconds=0"]
    timed.main(timed.arguments().parse_args(sizes))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["prefill", "decode", "train"]
    assert all('"of": 2' in line for line in shown[1:])


@pytest.mark.slow
def test_costs_of_checkpoints_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    costs = example("checkpoint_costs")
    costs.main(costs.parser().parse_args(["lstm", "--processes=2"]))
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        own = [
            line.split(": ")[1].split()[0] for line in lines if line.startswith(f"process {rank}")
        ]
        assert own == ["own", "save", "save", "resume"]


@pytest.mark.slow
def test_the_choice_of_auto_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    choice = example("auto_choice")
    small = ["--processors=avx2", "--only=short_conv", "--lengths=16", "--seconds=0", "--near=0"]
    choice.main([*small, "--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith("as avx2: 2 cases, ")
    assert (tmp_path / "auto-avx2.json").exists()


@pytest.mark.slow
def test_two_checkouts_train_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    timed, here = example("two_checkouts"), str(EXAMPLES.parent)
    small = ["--model", "lstm", "8", "--task", "associative_recall(batch_size=2)", "5"]
    timed.main(timed.arguments().parse_args([here, here, *small, "--updates", "2"]))
    _, line, total = capsys.readouterr().out.splitlines()
    assert line.endswith("x  lstm on associative_recall(batch_size=2)")
    assert total.endswith("x")
    assert float(total.split()[-1][:-1]) > 0


def test_losses_of_two_checkouts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    timed, here = example("two_checkouts"), str(EXAMPLES.parent)
    asked = ["--losses", "--updates", "1", "--recipes", "h3/associative_recall.yaml"]
    timed.main(timed.arguments().parse_args([here, here, *asked]))
    assert capsys.readouterr().out == "1 of 1 recipes have the same losses to the bit\n"


@pytest.mark.slow
def test_packed_rows_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["lstm", "--length=64", "--rows=2", "--d_model=8", "--rounds=1"]
    example("packing_speed").main(sizes)
    lines = capsys.readouterr().out.splitlines()
    assert "join 100.0%" in lines[1]
    assert lines[-1].startswith("| lstm | ")


def test_long_updates_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    long = example("long_updates")
    long.main(long.arguments().parse_args(["s4d", "--lengths", "8", "16"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" positions")[0] for line in lines] == ["8", "16"]


def test_errors_of_precisions_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    measured = example("bfloat16_errors")
    sizes = ["h3", "--width", "16", "--length", "32", "--seeds", "0"]
    measured.main(measured.arguments().parse_args(sizes))
    *_, line = capsys.readouterr().out.splitlines()
    whole, _, autocast, *_ = (float(error) for error in line.split("|")[2:-1])
    assert 0 < whole < 1e-4 < autocast < 0.1


def test_rounded_weights_are_smaller(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = stateline.ModelConfig("attention", vocab_size=256, d_model=64)
    stateline.save_model(stateline.LanguageModel(config), tmp_path)
    (tmp_path / "text").write_text("some text " * 9, encoding="utf-8")
    rounded = example("rounded_weights")
    sizes = ["--window=32", "--windows=2", "--tokens=2", "--rounds=1"]
    rounded.main(rounded.arguments().parse_args([str(tmp_path), str(tmp_path / "text"), *sizes]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["float32", "bfloat16", "int8"]
    nats = [float(line.split()[-4]) for line in lines]
    assert nats == pytest.approx([nats[0]] * 3, abs=0.05)


@pytest.mark.parametrize(("case", "most"), [("forward", 110), ("token", 165)])
def test_the_way_to_the_kernels_does_not_grow(case: str, most: int) -> None:
    assert example("python_calls").calls(case).total() <= most


def test_every_example_says_how_it_is_run() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert files
    runs = {f.name: (f.read_text().split("Run it:")[1:] or [""])[0] for f in files}
    silent = [name for name, run in runs.items() if f"python examples/{name}" not in run]
    assert silent == []


def test_no_half_of_the_seeds_contradicts_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    example("seed_sets").main(EXAMPLES.parent / "docs" / "gallery" / "hybrids")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.endswith("0 contradicted by the other") for line in lines)
    assert ": 2 claims in both, 8 in one alone" in lines[1]


def test_no_two_sets_of_three_seeds_contradict_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example("seed_sets").main(EXAMPLES.parent / "docs" / "gallery" / "hybrids", 3)
    first, second, contrary, against, *answers = capsys.readouterr().out.splitlines()
    assert first.startswith("seeds 0 to 2: 15 claims: Copying: attention > lstm; ")
    assert second.startswith("seeds 3 to 5: 15 claims: Copying: attention > lstm; ")
    assert contrary == "0 claims of one set contradict a claim of another"
    assert against == "0 claims have the medians of another set against them"
    assert "Copying at 8 within state<=64KiB: h3 from all seeds, 2 of 2 sets" in answers


@pytest.mark.slow
def test_a_comparison_gets_scores_at_further_lengths(tmp_path: Path) -> None:
    task = "associative_recall(length=4, batch_size=4)"
    comparison = Comparison(["lstm"], [task], d_model=8, steps=1, protocol="quick", seeds=2)
    own = compare(comparison, tmp_path / "own", workers=0, timing="none")
    example("further_lengths").main(tmp_path / "own", tmp_path / "further", [4, 24], 4)
    further = read_results(tmp_path / "further")
    assert further.tasks[0].eval_lengths == [4, 8, 16, 24]
    assert further.tasks[0].problems == own.tasks[0].problems // 4
    for before, after in zip(own.runs, further.runs, strict=True):
        assert after.by_length.keys() == {4, 8, 16, 24}
        assert after.by_length[8] == before.by_length[8]
        assert 0 <= after.by_length[24]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("task", "recipe"),
    [("recall", "associative_recall_h3"), ("induction", "induction_head_h3")],
)
def test_official_code_is_trained_at_the_rates_of_our_recipe(task: str, recipe: str) -> None:
    official = example("official_h3")
    setting = official.SETTINGS[task]
    given, spec = read_recipe(RECIPES / f"h3/paper/{recipe}.yaml", recipe)
    ours = TrainConfig(**given.train)
    assert f"(examples={official.EXAMPLES}, batch_size={official.BATCH}, " in spec
    assert (ours.steps, ours.lr) == (setting.steps, official.RATE)
    for step in (0, 1, ours.warmup_steps, ours.steps // 2, ours.steps - 1):
        expected = learning_rate_share(ours, step)
        assert official.share(setting, step) == pytest.approx(expected, abs=0.002)  # its 1e-6


def test_states_that_hold_most_of_the_attention_are_counted() -> None:
    held = example("context_attention").held
    seen = torch.arange(128) + 1.0
    equal = torch.ones(128, 128).tril() / seen[:, None]
    states, alike, share = held(equal)
    assert states == pytest.approx(alike, abs=0.1)
    assert share == pytest.approx((100 * (50 / seen[64:])).mean().item())
    assert held(torch.eye(128)) == pytest.approx([1, alike, 100])


@pytest.mark.slow
def test_errors_on_recall_are_shown_by_how_far_back_the_pair_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job("associative_recall", 1, ModelConfig("h3", 10, d_model=8), TrainConfig(steps=1))
    run_whole(job, tmp_path)
    example("recall_errors").main([tmp_path])
    heads, line = capsys.readouterr().out.splitlines()
    assert heads.endswith("6 to 9 back")
    assert all(50 < float(own) <= 100 for own in line.split()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["copying", "lookup"])
def test_heads_are_kept_and_judged_and_finished_students_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    study = example("hybrid_study")
    grid = [("ranking", 16, 1), ("chance", 16, 1), ("layers", 16, 4), ("ranking", 16, 0)]
    monkeypatch.setattr(study, "GRID", grid)
    monkeypatch.setattr(study, "ROUNDS", 1)
    options = [f"--task={task}", "--cells=3", "--share=0.002", "--seeds", "0", "1"]
    given = study.arguments().parse_args([str(tmp_path), *options])
    study.main(given)
    shown = capsys.readouterr().out
    assert shown.count("undecided (p = 1.0000)") == 3
    assert shown.count(", 0 of 2, ") == 0  # a teacher that answers nothing is soon recovered
    record = read_table(tmp_path / "table.json")
    assert [row.x for row in record.rows] == [8, 1, 1, 1, 1, 1, 1, 4, 4, 4]
    assert all(len(row.values[0]) == 2 for row in record.rows)
    kept = study.Student("mamba2", 16, "layers", 4), study.Run(tmp_path / "seed-0", task, 0, 1.0)
    assert len({layer for layer, _ in study.result(*kept, {}).kept}) == 1
    assert (tmp_path / "kept-heads.svg").read_text().count("<svg") == 1
    monkeypatch.setattr(study, "learned", None)
    study.main(given)
    assert read_table(tmp_path / "table.json").rows == record.rows
    once = capsys.readouterr().out
    study.main(study.arguments().parse_args([str(tmp_path), f"--table={tmp_path / 'table.json'}"]))
    assert once.endswith(capsys.readouterr().out)


def test_peers_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    timed, file = example("beside_peers"), tmp_path / "beside.json"
    small = ["--lengths=8", "--width=8", "--sizes=16/8/2", "--seconds=0", "--dtypes=float32"]
    nowhere = [f"--peers={tmp_path}", f"--models={tmp_path}", f"--record={file}"]
    monkeypatch.setattr(timed, "LAYERS", {"h3": "safari", "mamba2": "hf"})
    timed.main(timed.arguments().parse_args([*small, *nowhere]))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("h3, 4 x 8, forward, float32: ours ")
    assert "no safari: the peer 'safari' needs a checkout" in shown[0]
    assert "no nanogpt: the peer 'nanogpt' needs a checkout" in shown[4]
    assert shown[5].endswith("no hf llama: import of transformers halted; None in sys.modules")
    assert [case["case"] for case in json.loads(file.read_text())["cases"]][4] == "update 16/8/2"
