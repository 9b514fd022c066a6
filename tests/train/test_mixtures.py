"""Training of mixtures of experts, shared blocks and layers side by side."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.layers import MoE
from stateline.models.checkpoint import load_model, save_model
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.tasks import Text
from stateline.train.config import TrainConfig
from stateline.train.loop import train

CONFIG = ModelConfig(
    "shared(attention, parallel(rwkv7, lstm), s4d)",
    vocab_size=256,
    d_model=8,
    feed_forward="moe",
    layers={"moe": {"experts": 4, "d_hidden": 8}, "rwkv7": {"rank": 2}},
)


def learned(
    text: Text, *, folder: Path | None = None, until: int = 99, **settings: Any
) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    defaults = {"steps": 4, "warmup_steps": 0, "eval_every": 2, "save_every": 2}
    steps = iter(range(1, 100))
    config = TrainConfig(**{**defaults, **settings})
    train(model, text, config, folder=folder, interrupted=lambda: next(steps) >= until)
    return model


def same(one: LanguageModel, other: LanguageModel) -> bool:
    wanted = other.state_dict()
    return all(value.equal(wanted[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [{"accumulate": 2}, {"carry_state": True, "carry_cap": 64}, {"optimizer": "muon"}],
)
def test_a_resumed_run_ends_with_the_same_weights(
    text: Text, tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = learned(text, **settings)
    learned(text, folder=tmp_path, until=2, **settings)
    assert same(whole, learned(text, folder=tmp_path, **settings))


def test_activations_that_are_computed_again_change_nothing(text: Text) -> None:
    assert same(learned(text), learned(text, checkpoint_activations=True))


def test_each_of_several_micro_batches_has_its_share_in_the_loss_that_balances(text: Text) -> None:
    model = learned(text, accumulate=2)
    assert {module.share for module in model.modules() if isinstance(module, MoE)} == {0.5}


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = LanguageModel(CONFIG).eval(), torch.arange(9)[None]
    save_model(model, tmp_path)
    assert load_model(tmp_path)(tokens).equal(model(tokens))
