"""Jobs: names of their folders, and tasks that cannot score a model."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.generate import load_run
from stateline.models.config import ModelConfig
from stateline.runs.folder import slug
from stateline.runs.job import Job, check_job, digest
from stateline.runs.train import run_job
from stateline.tasks import make_task
from stateline.train.config import TrainConfig

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


@pytest.mark.slow
def test_runs_share_their_initial_weights_and_differ_in_the_rest(tmp_path: Path) -> None:
    def weights(seed: int, init_seed: int | None) -> Tensor:
        training = TrainConfig(steps=1, lr=1e-9, seed=seed, init_seed=init_seed)
        folder = tmp_path / f"{seed} {init_seed}"
        job = Job("associative_recall(length=2, vocab_size=4)", 1, MODEL, training)
        run_job(job, folder, lambda _: None)
        return load_run(folder)[0].state_dict()["embedding.weight"]

    same, shared, other = weights(1, None), weights(0, 1), weights(0, None)
    torch.testing.assert_close(shared, same)
    assert not torch.allclose(other, same)
