"""Training with dropout: masks follow from the seed and the step."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.loop import train
from stateline.train.update import Updater

LAYERS = {
    "feed_forward": {"dropout": 0.2},
    "lstm": {"dropout": 0.3, "n_layers": 2},
    "sliding_attention": {"dropout": 0.2, "window": 6},
}


def learned(
    text: Text, *, folder: Path | None = None, until: int = 99, rate: float = 0.1, **settings: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LanguageModel(
        ModelConfig(
            "ladder(sliding_attention) lstm",
            vocab_size=256,
            d_model=8,
            layers=LAYERS if rate else {},
            embedding_dropout=rate,
            residual_dropout=rate,
        )
    )
    defaults = {"steps": 4, "warmup_steps": 0, "eval_every": 2, "save_every": 2}
    config = TrainConfig(**{**defaults, **settings})
    steps = iter(range(1, 100))
    train(model, text, config, folder=folder, interrupted=lambda: next(steps) >= until)
    return model.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("settings", [{}, {"carry_state": True}, {"accumulate": 2}])
def test_a_resumed_run_draws_the_same_masks(
    text: Text, tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = learned(text, **settings)
    torch.rand(17)  # what else is drawn does not count
    learned(text, folder=tmp_path, until=2, **settings)
    torch.rand(5)
    assert same(whole, learned(text, folder=tmp_path, **settings))
    assert not same(whole, learned(text, rate=0.0, **settings))


@pytest.mark.parametrize("settings", [{}, {"carry_state": True}, {"segment_len": 8}])
def test_recomputed_activations_are_dropped_alike(text: Text, settings: dict[str, Any]) -> None:
    kept = learned(text, **settings)
    again = learned(text, checkpoint_activations=True, **settings)
    for name in kept:
        torch.testing.assert_close(again[name], kept[name], rtol=1e-6, atol=1e-7)


def test_masks_depend_on_the_seed_and_leave_the_random_state_alone(text: Text) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    one = learned(text, seed=1)
    learned(text, seed=1)
    torch.manual_seed(1)
    assert torch.rand(3).equal(wanted)
    assert not same(one, learned(text, seed=2))


def test_every_seed_update_and_process_draws_masks_of_its_own() -> None:
    found = set()
    for seed, step, rank in product(range(2), repeat=3):
        updater: Any = SimpleNamespace(
            config=SimpleNamespace(seed=seed), processes=SimpleNamespace(rank=rank)
        )
        found.add(Updater._seed(updater, step))
    assert len(found) == 8
