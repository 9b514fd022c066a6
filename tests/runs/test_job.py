"""Jobs: names of their folders, tasks that cannot score a model, and what a record tells."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.generate import load_run
from stateline.models.checkpoint import load_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters
from stateline.runs.folder import slug
from stateline.runs.job import Job, check_job, digest, training_costs
from stateline.runs.score import (
    EVAL_BATCHES,
    needed_bits,
    sample_text,
    score_by_length,
    score_by_position,
)
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.metrics import Metrics
from stateline.train.optimizer import OPTIMIZERS, make_optimizer
from tests.whole_runs import run_whole

MODEL = ModelConfig("h3", 30, layers={"h3": {"d_state": 4}})


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "recall"},
        {"parameters_wanted": 2},
        {"data": "9f2c"},
        {"model": dataclasses.replace(MODEL, d_model=8)},
        {"model": dataclasses.replace(MODEL, layers={"h3": {"d_state": 8}})},
        {"training": TrainConfig(lr=0.1)},
        {"training": TrainConfig(seed=1)},
    ],
)
def test_whatever_decides_the_outcome_is_part_of_the_name(changes: dict[str, object]) -> None:
    job = Job("copying", 1, MODEL, TrainConfig())
    assert dataclasses.replace(job, **changes).name != job.name  # type: ignore[arg-type]


def test_settings_at_their_defaults_leave_the_name_as_it_is() -> None:
    @dataclasses.dataclass(frozen=True)
    class Later(TrainConfig):
        added: int = 3

    job = Job("copying", 1, MODEL, TrainConfig())
    assert digest(dataclasses.replace(job, training=Later())) == digest(job)
    assert digest(dataclasses.replace(job, training=Later(added=4))) != digest(job)


def test_an_alias_names_the_model_and_not_the_job() -> None:
    job = Job("copying", 1, MODEL, TrainConfig())
    named = dataclasses.replace(job, alias="small")
    assert (job.label, named.label) == ("h3", "small")
    assert (named, named.name, digest(named)) == (job, job.name, digest(job))


def test_a_slug_is_short_and_never_empty() -> None:
    assert slug("h3(d_state=4)*2 ") == "h3-d-state-4-2"
    assert slug("()") == "unnamed"
    assert len(slug("h3 " * 100)) <= 60


def test_learned_positions_that_are_too_few_are_named_before_training() -> None:
    job = Job("copying", 1, ModelConfig("attention", 30, max_len=20), TrainConfig())
    with pytest.raises(InputError, match=r"but max_len is 20: set max_len to at least \d+"):
        check_job(job, make_task("copying"))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_memory_of_an_optimizer_is_that_of_its_moments(kind: str) -> None:
    training, model = TrainConfig(optimizer=kind), LanguageModel(MODEL)
    optimizer = make_optimizer(model, training)
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    optimizer.step()
    kept = [moment.nbytes for state in optimizer.state.values() for moment in state.values()]
    told = training_costs(Job("copying", 1, MODEL, training), make_task("copying")).memory
    assert told["optimizer"] == sum(kept)


@pytest.mark.slow
def test_runs_share_their_initial_weights_and_differ_in_the_rest(tmp_path: Path) -> None:
    def weights(seed: int, init_seed: int | None) -> Tensor:
        training = TrainConfig(steps=1, lr=1e-9, seed=seed, init_seed=init_seed)
        folder = tmp_path / f"{seed} {init_seed}"
        job = Job("associative_recall(length=2, vocab_size=4)", 1, MODEL, training)
        run_whole(job, folder)
        return load_run(folder)[0].state_dict()["embedding.weight"]

    same, shared, other = weights(1, None), weights(0, 1), weights(0, None)
    torch.testing.assert_close(shared, same)
    assert not torch.allclose(other, same)


def test_a_record_tells_what_was_trained_and_how_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.tasks.AssociativeRecall.solved_at", 0.0)
    monkeypatch.setattr("stateline.runs.train.needed_bits", lambda *_: None)
    task = "associative_recall(length=8, vocab_size=16)"
    training = TrainConfig(steps=6, lr=0.05, warmup_steps=0, log_every=1, eval_every=2)
    named = {"alias": "small", "family": "ours", "size": 5, "own_size": 6}
    job, lines = Job(task, 77, MODEL, training, **named), list[Metrics]()
    run = run_whole(job, tmp_path, lines.append)
    assert (run.model, run.family, run.size, run.own_size) == ("small", "ours", 5, 6)
    assert (run.parameters_wanted, run.parameters) == (77, count_parameters(MODEL))
    told = [(line.step, line.loss, line.metric) for line in lines]
    assert [(point.step, point.loss, point.metric) for point in run.curve] == told
    assert (run.steps_to_solve, run.validation) == (2, lines[-1].metric)
    made = make_task(task)
    tokens = sum(made.train_batch(step).targets.numel() for step in range(6))
    assert run.tokens_per_second * run.seconds == pytest.approx(tokens)
    model, length = load_model(tmp_path), made.train_length
    part, whole = (evaluate(model, made, length, batches=n) for n in (1, EVAL_BATCHES))
    assert run.by_length[length] == whole != part


@pytest.mark.parametrize("max_len", [20, 70])
def test_a_sample_ends_with_the_positions_of_its_model(tmp_path: Path, max_len: int) -> None:
    """The last token is not fed, so it needs no position."""
    (tmp_path / "book.txt").write_text("one two three " * 400)
    task = make_task(f"text(path={tmp_path}, length=8, longest=8)")
    model = LanguageModel(ModelConfig("attention", 128, 8, max_len=max_len)).eval()  # of ASCII
    assert len(sample_text(model, task) or "") == max_len + 1


def test_a_sample_holds_text_alone(tmp_path: Path) -> None:
    """No tokens that only the model has, and no bytes that are not UTF-8."""
    (tmp_path / "book.txt").write_text("é one two " * 400)
    task = make_task(f"text(path={tmp_path}, length=8, longest=8)")
    model = LanguageModel(ModelConfig("lstm", 300, 8)).eval()
    torch.nn.init.zeros_(model.embedding.weight)  # all tokens are equally likely
    text = sample_text(model, task)
    assert text is not None
    assert "\ufffd" in text
    assert text.encode()


def test_a_model_that_gives_nan_has_no_scores_no_sample_and_needs_no_bits(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three " * 400)
    task, copying = make_task(f"text(path={tmp_path}, length=8, longest=8)"), make_task("copying")
    model = LanguageModel(ModelConfig("lstm", 128, 8)).eval()
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    assert sample_text(model, task) is None
    scores = score_by_length(model, copying)
    assert scores == {length: {copying.metric: None} for length in copying.eval_lengths}
    assert needed_bits(model, copying, scores) is None


def test_scores_by_position_are_those_of_the_longest_texts(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two three " * 400)
    task = make_task(f"text(path={tmp_path}, length=8, longest=32)")
    model = LanguageModel(ModelConfig("lstm", 128, 8)).eval()
    assert max(score_by_position(model, task)) == 32
