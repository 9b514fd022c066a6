"""What a comparison consists of: models from any source, at one or several sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stateline.cli.compare import _comparison, add_arguments
from stateline.cli.parser import Parser
from stateline.compare import Comparison, Job, Recipe, plan
from stateline.compare.recipe import split_alias
from stateline.errors import InputError
from stateline.models.checkpoint import save_model
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model
from stateline.models.size import count_parameters, meta_model
from stateline.runs.protocol_records import TOLERANCE
from stateline.tasks import TASKS, Copying, make_task
from tests.whole_runs import run_whole

RECALL = "associative_recall(length=4, batch_size=4)"


def jobs_of(*models: str | Recipe, **settings: Any) -> list[Job]:
    return plan(Comparison(models, [RECALL], **{"protocol": "quick", "steps": 2} | settings))


def given(*arguments: str) -> Comparison:
    """The comparison that a command line asks for."""
    parser = Parser(prog="stateline compare")
    add_arguments(parser)
    return _comparison(parser.parse_args(arguments))


class TestSizes:
    def test_several_sizes_are_several_models(self) -> None:
        jobs = jobs_of("a=attention*2", "h3", parameters=[20_000, 50_000])
        assert [job.label for job in jobs] == ["a · 20k", "a · 50k", "h3 · 20k", "h3 · 50k"]
        assert [job.family for job in jobs] == ["a", "a", "h3", "h3"]
        assert [job.size for job in jobs] == [20_000, 50_000] * 2
        for job in jobs:
            assert job.own_size == count_parameters(job.model)
            assert job.own_size == pytest.approx(job.size, rel=0.15)

    def test_one_size_leaves_the_names_alone(self) -> None:
        (job,) = jobs_of("h3", parameters=20_000)
        assert (job.label, job.family, job.size) == ("h3", "", 20_000)

    @pytest.mark.parametrize(("match", "width"), [("flops", 32), ("state", 8)])
    def test_models_match_in_what_was_asked(self, match: Any, width: int) -> None:
        train_length = make_task(RECALL).train_batch(0).tokens.shape[1]
        measures = {
            "flops": lambda config: meta_model(config).flops_per_token(train_length),
            "state": lambda config: meta_model(config).state_bytes(train_length),
        }
        measure = measures[match]
        first, *others = jobs_of("h3*2", "attention*2", "lstm*2", match=match, d_model=width)
        assert first.model.d_model == width
        assert first.size == first.own_size == round(measure(first.model))
        for job in others:
            assert job.size == first.size
            assert job.own_size == round(measure(job.model))
            assert abs(job.own_size / job.size - 1) <= TOLERANCE
            assert job.parameters_wanted == count_parameters(job.model)

    def test_states_match_at_the_length_that_was_asked(self) -> None:
        options = {"match": "state", "match_length": 2000, "d_model": 8}
        first, other = jobs_of("attention*2", "h3*2", **options)
        assert first.size == meta_model(first.model).state_bytes(2000)
        assert other.own_size == meta_model(other.model).state_bytes(2000)
        assert abs(other.own_size / first.size - 1) <= TOLERANCE
        with pytest.raises(InputError, match="match_length goes with match=flops or match=state"):
            jobs_of("h3", match_length=2000)
        with pytest.raises(InputError, match="match_length must be at least 1"):
            jobs_of("h3", match="state", match_length=0)

    def test_a_state_that_no_width_changes_is_refused(self) -> None:
        said = "400 state bytes at the training length within 5%, but the nearest that 'fe"
        with pytest.raises(InputError, match=said):
            jobs_of("attention", "feed_forward", match="state", d_model=8)

    def test_a_size_that_a_model_cannot_have_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(InputError, match=r"must have 10 parameters within 5%") as caught:
            jobs_of("h3*2", parameters=10)
        assert "nearest that 'h3*2' can have is 640 (d_model 4)" in str(caught.value)
        with pytest.raises(InputError, match=r"is 1,248 \(d_model 16\) or 2,272 \(d_model 16\)"):
            jobs_of("attention(n_heads=8)", parameters=1_500, model={"feed_forward": "none"})

    @pytest.mark.parametrize(
        "parameters", [8_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (25_000, 300_000))]
    )
    def test_equal_size_is_within_five_percent(self, parameters: int) -> None:
        heads = "attention(position=hard_alibi, n_heads=8)"
        models = [f"{heads}*2", "lstm*2", "s4d*2", "h3*2", f"h3 {heads}", f"lstm {heads}", "s5*2"]
        for job in jobs_of(*models, "mamba*2", "gated_delta_net", parameters=parameters):
            assert abs(count_parameters(job.model) / parameters - 1) <= TOLERANCE

    def test_what_the_pattern_says_is_kept(self) -> None:
        heads = "attention(position=hard_alibi, n_heads=8)"
        *_, job = jobs_of("lstm*2", f"h3 {heads}", d_model=60)
        assert job.model.d_model % 8 == 0
        own = dict(job.model.layers["feed_forward"])
        assert own != {"d_hidden": 4 * job.model.d_model}
        fixed = {"layers": {"feed_forward": {"d_hidden": 8}}}
        *_, job = jobs_of("lstm*2", f"h3 {heads}", d_model=50, model=fixed)
        assert job.model.layers["feed_forward"] == {"d_hidden": 8}
        assert job.model.layers.keys() - {"feed_forward"}

    def test_the_first_model_is_sized_by_its_parameters_whatever_matches(self) -> None:
        first, _ = jobs_of("h3*2", "attention*2", match="flops", parameters=30_000)
        assert count_parameters(first.model) == pytest.approx(30_000, rel=0.1)

    def test_without_a_match_all_have_one_width(self) -> None:
        jobs = jobs_of("h3*2", "attention", match="none", d_model=24)
        assert {job.model.d_model for job in jobs} == {24}
        assert {job.size for job in jobs} == {None}


class TestModels:
    def test_an_alias_is_not_a_keyword(self) -> None:
        assert split_alias("my model = h3*2") == ("my model", "h3*2")
        assert split_alias('h3(init="inv")') == ("", 'h3(init="inv")')
        assert split_alias("(h3 attention(n_heads=2))*2")[0] == ""

    def test_settings_of_all_models_override_those_of_recipes(self) -> None:
        own = Recipe("h3", "own", {"norm": "rms", "block": "parallel"}, {"lr": 0.5, "clip": 0.25})
        first, other = jobs_of(own, "lstm", model={"norm": "none"}, train={"clip": 0.75})
        assert (first.model.norm, first.model.block) == ("none", "parallel")
        assert (first.training.lr, first.training.clip) == (0.5, 0.75)
        assert (other.model.norm, other.training.clip) == ("none", 0.75)

    def test_a_recipe_with_a_width_keeps_it(self) -> None:
        own = Recipe("h3", model={"d_model": 12})
        assert [job.model.d_model for job in jobs_of("attention", own)] == [64, 12]
        assert jobs_of(own, "h3*2")[0].model.d_model == 12
        assert jobs_of("attention", own, d_model=16)[1].model.d_model != 12

    def test_a_model_that_is_listed_twice_runs_once_under_each_of_its_names(self) -> None:
        jobs = jobs_of("lstm", "h3", "lstm", "other=lstm")
        assert [job.label for job in jobs] == ["lstm", "h3", "other"]

    def test_different_models_of_one_name_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"two different models are called 'h3': name them"):
            jobs_of("h3", Recipe("h3", model={"norm": "rms"}))

    def test_runs_may_start_from_the_weights_in_a_folder(self, tmp_path: Path) -> None:
        config = ModelConfig("h3", vocab_size=10, d_model=8)
        torch.manual_seed(7)
        model = make_model(config)
        save_model(model, tmp_path / "begun")
        begun, fresh = jobs_of(str(tmp_path / "begun"), "h3")
        assert (begun.label, begun.model) == ("begun", config)
        assert begun.model == fresh.model
        assert begun.name != fresh.name
        still = {"train": {"lr": 1e-30, "weight_decay": 0.0}}
        (begun,) = jobs_of(str(tmp_path / "begun"), **still)
        run_whole(begun, tmp_path / "run")
        first, last = (
            load_file(tmp_path / folder / "model.safetensors") for folder in ("begun", "run")
        )
        for name, tensor in first.items():
            torch.testing.assert_close(last[name], tensor, rtol=0, atol=1e-20)
        with pytest.raises(InputError, match="leave out d_model and parameters"):
            jobs_of(str(tmp_path / "begun"), d_model=16)

    def test_other_weights_in_the_folder_are_another_run(self, tmp_path: Path) -> None:
        names = set()
        for _ in range(2):
            save_model(make_model(ModelConfig("h3", vocab_size=10, d_model=8)), tmp_path / "m")
            names.add(jobs_of(str(tmp_path / "m"))[0].name)
        assert len(names) == 2


class TestTasks:
    def test_training_among_the_keywords_is_for_that_task_alone(self) -> None:
        tasks = ["copying(max_len=8, steps=7, schedule=linear)*2", RECALL]
        first, _, other = plan(Comparison(["h3"], tasks, protocol="quick", steps=3))
        assert (first.task, first.training.seed) == ("copying(max_len=8)", 0)
        assert (first.training.steps, first.training.schedule) == (7, "linear")
        assert (other.task, other.training.steps) == (RECALL, 3)

    def test_a_keyword_of_the_task_itself_is_no_training(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Walk(Copying):
            def __init__(self, seed: int = 0, *, steps: int = 5) -> None:
                super().__init__(seed, max_len=steps)

        monkeypatch.setitem(TASKS, "walk", Walk)
        (job,) = plan(Comparison(["h3"], ["walk(steps=7)"], protocol="quick", steps=3))
        assert (job.task, job.training.steps) == ("walk(steps=7)", 3)

    def test_one_task_cannot_be_trained_in_two_ways(self) -> None:
        with pytest.raises(InputError, match="copying is listed twice"):
            plan(Comparison(["h3"], ["copying", "copying(steps=7)"]))


class TestCommandLine:
    def test_all_options_reach_the_comparison(self) -> None:
        options = (
            "--parameters 100k 1.5m 77 --match flops --lrs 1e-3 0.01 --weight_decays 0 --seeds 5"
        )
        more = "--train.clip 0.5 --model.norm rms --tasks copying*2"
        found = given("a=h3*2", "(h3 attention)*2", *options.split(), *more.split())
        assert found.sizes == (100_000, 1_500_000, 77)
        assert (found.match, found.lrs, found.weight_decays) == ("flops", [1e-3, 0.01], [0.0])
        assert (found.seeds, found.protocol) == (5, "sweep")
        assert (found.train, found.model) == ({"clip": 0.5}, {"norm": "rms"})
        assert list(found.tasks) == ["copying*2"]

    def test_nothing_is_set_that_was_not_given(self) -> None:
        found = given("h3")
        assert (found.train, found.model, found.sizes) == ({}, {}, ())
        assert list(found.tasks) == ["associative_recall", "copying", "text"]

    def test_recipes_bring_their_settings_and_tasks(self, tmp_path: Path) -> None:
        path = tmp_path / "own.yaml"
        path.write_text(f"pattern: h3*2\ntask: {RECALL}\nmodel: {{norm: rms}}\ntrain: {{lr: 2e-3}}")
        found = given(str(path), f"second={path}", "lstm")
        assert found.patterns == [
            Recipe("h3*2", "own", {"norm": "rms"}, {"lr": 2e-3}),
            Recipe("h3*2", "second", {"norm": "rms"}, {"lr": 2e-3}),
            "lstm",
        ]
        assert list(found.tasks) == [RECALL]
        assert list(given(str(path), "--tasks", "copying").tasks) == ["copying"]

    @pytest.mark.parametrize("text", ["many", "1.5x", "k", "1e999k"])
    def test_what_is_no_number_is_named(self, text: str) -> None:
        with pytest.raises(InputError, match="parameters must be a number such as 250000, 300k"):
            given("h3", "--parameters", text)

    def test_a_recipe_without_a_pattern_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "empty.yaml").write_text("task: copying")
        with pytest.raises(InputError, match="names no pattern"):
            given(str(tmp_path / "empty.yaml"))


@pytest.mark.parametrize(
    ("arguments", "decide"),
    [
        ([], "best"),
        (["--protocol", "quick"], "no"),
        (["--seeds", "3"], "no"),
        (["--seeds", "9", "--decide"], "best"),
        (["--decide", "order", "--budget_minutes", "5"], "order"),
    ],
)
def test_seeds_are_added_by_default_unless_their_number_is_given(
    arguments: list[str], decide: str
) -> None:
    comparison = given("h3", *arguments)
    assert comparison.decide == decide
    assert comparison.budget_minutes == (5 if "--budget_minutes" in arguments else None)
