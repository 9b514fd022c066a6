"""Training of mixtures of experts, shared blocks and layers side by side."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    layers={"moe": {"experts": 4, "d_hidden": 8, "correction": True}, "rwkv7": {"rank": 2}},
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


def test_the_loss_that_balances_weighs_each_call_by_its_positions(text: Text) -> None:
    """If all use the same experts, it is a mean over positions: its gradient does not tell cuts."""
    settings = {"experts": 4, "d_hidden": 8, "correction": True, "balance": 100.0}

    def gradients(pattern: str, **training: Any) -> list[Tensor]:
        torch.manual_seed(0)
        own = dataclasses.replace(CONFIG, pattern=pattern, layers={"moe": settings})
        model = LanguageModel(own)
        for module in model.modules():
            if isinstance(module, MoE):
                module.correction = torch.tensor([9.0, 9.0, 0.0, 0.0])
        train(model, text, TrainConfig(steps=1, eval_every=0, clip=0.0, **training))
        assert all(own.positions is None for own in model.modules() if isinstance(own, MoE))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    wanted = gradients("moe")
    for cut in (
        gradients("moe", segment_len=12),
        gradients("state_passing(moe, chunk_len=5)"),
        gradients("state_passing(moe, chunk_len=5)", segment_len=12),
    ):
        torch.testing.assert_close(cut, wanted)


def test_the_uses_of_all_calls_in_an_update_correct_the_choice_of_experts(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uses(**settings: Any) -> list[float]:
        found = list[float]()
        with monkeypatch.context() as patch:
            patch.setattr(MoE, "correct", lambda _, uses: found.append(float(uses.sum())))
            learned(text, steps=1, **settings)
        return found

    whole = uses()
    assert whole
    assert uses(segment_len=7) == uses(checkpoint_activations=True) == whole
    assert uses(accumulate=2) == [2 * own for own in whole]
    mixtures = [own for own in learned(text).modules() if isinstance(own, MoE)]
    assert all(own.correction is not None and own.correction.any() for own in mixtures)
    assert all(own.uses is None for own in mixtures)


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = LanguageModel(CONFIG).eval(), torch.arange(9)[None]
    save_model(model, tmp_path)
    assert load_model(tmp_path, device=tokens.device)(tokens).equal(model(tokens))
