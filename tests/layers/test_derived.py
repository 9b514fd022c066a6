from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.generate import prefill
from stateline.generate.session import Session
from stateline.layers import LAYERS
from stateline.layers.derived import Memory, derived, remembering
from stateline.layers.mixers.shift_ssm import ShiftSSM
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


def change(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2.0)


def test_outside_nothing_is_remembered() -> None:
    layer = ShiftSSM(2, d_state=4)
    with torch.no_grad():
        before = layer.taps()
        change(layer)
        assert not layer.taps().equal(before)


def test_inside_it_is_computed_once_for_each_layer() -> None:
    layers = [ShiftSSM(2, d_state=4) for _ in range(2)]
    memory = Memory(nn.ModuleList(layers))
    with torch.no_grad(), remembering(memory):
        before = [layer.taps() for layer in layers]
        change(layers[0])
        assert [layer.taps() is taps for layer, taps in zip(layers, before, strict=True)] == [
            True
        ] * 2
    assert not before[0].equal(before[1])


def test_with_gradients_it_is_computed_anew() -> None:
    layer = ShiftSSM(2, d_state=4)
    with remembering(Memory(layer)):
        with torch.no_grad():
            layer.taps()
        assert layer.taps().requires_grad


def test_each_memory_is_its_own() -> None:
    layer = ShiftSSM(2, d_state=4)
    with torch.no_grad():
        with remembering(Memory(layer)):
            before = layer.taps()
        change(layer)
        with remembering(Memory(layer)):
            assert not layer.taps().equal(before)


class Scaled(nn.Module):
    """A weight of a layer inside, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))
        self.map = nn.Linear(1, 1)
        self.register_buffer("scale", torch.ones(1))

    @derived
    def weight(self) -> Tensor:
        return self.map.weight * self.scale

    @derived
    def whole(self) -> Tensor:
        return self.map.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.map.weight.mul_(2.0),
        lambda layer: layer.scale.mul_(2.0),
        lambda layer: setattr(layer, "map", nn.Linear(1, 1)),
        lambda layer: setattr(layer, "scale", torch.zeros(1)),
    ],
    ids=["weight inside", "buffer", "layer inside", "other buffer"],
)
def test_it_is_computed_again_after_a_change(change: Callable[[Scaled], Any]) -> None:
    layer = Scaled()
    memory = Memory(layer)
    with torch.no_grad():
        with remembering(memory):
            before = layer.weight()
        change(layer)
        with remembering(memory) as changed:
            assert changed
            assert not layer.weight().equal(before)


def test_a_value_has_memory_of_its_own() -> None:
    layer = Scaled()
    with torch.no_grad(), remembering(Memory(layer)):
        assert layer.whole().data_ptr() != layer.map.weight.data_ptr()


@pytest.mark.parametrize("pattern", [*LAYERS, "ladder(h3 s4d, passes=2)"])
def test_a_session_gives_what_plain_steps_give(pattern: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(pattern, vocab_size=11, d_model=8)).eval()
    prompt = torch.tensor([[1, 2, 3]])
    session = Session(model, prefill(model, prompt))
    state = prefill(model, prompt)
    token, layers = state.token, state.model
    for _ in range(4):
        choice = session.step()
        with torch.inference_mode():
            logits, layers = model.step(token, layers)
        _same(choice.logits, logits)
        token = choice.tokens


def _same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
