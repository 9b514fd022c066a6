"""A decoder computes once what follows from the weights, and gives what the layer gives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.generate import prefill
from stateline.generate.session import Session
from stateline.layers import H3, LAYERS, RGLRU
from stateline.layers.decoder import Decoder, prepared, ready
from stateline.layers.mixers.shift_ssm import ShiftSSM
from stateline.layers.state import copied, leaves_of
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


def change(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2.0)


def test_a_layer_by_itself_keeps_nothing() -> None:
    layer = ShiftSSM(2, d_state=4)
    with torch.no_grad():
        before = layer.taps()
        change(layer)
        assert not layer.taps().equal(before)


def test_a_value_is_computed_once_for_each_layer() -> None:
    layers = ready(nn.ModuleList(ShiftSSM(2, d_state=4) for _ in range(2)))
    before = [layer.taps() for layer in layers]  # type: ignore[operator]
    assert [layer.taps() for layer in layers] == before  # type: ignore[operator]
    assert not before[0].equal(before[1])


class Scaled(nn.Module):
    """A weight of a layer inside, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))
        self.map = nn.Linear(1, 1)
        self.register_buffer("scale", torch.ones(1))

    @prepared
    def weight(self) -> Tensor:
        return self.map.weight * self.scale


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
def test_a_value_is_computed_again_after_a_change(change: Callable[[Scaled], Any]) -> None:
    layer = Scaled()
    decoder = Decoder(layer)
    with torch.no_grad():
        before = decoder.ready.weight()
        assert not decoder.is_stale()
        change(layer)
        assert decoder.is_stale()
        decoder.refresh()
        assert not decoder.ready.weight().equal(before)


@torch.no_grad()
def test_a_copy_of_a_decoder_decodes_with_the_copied_weights() -> None:
    decoder = Decoder(ShiftSSM(2, d_state=4))
    before = decoder.ready.taps()
    other = copy.deepcopy(decoder)
    change(other.layer)
    assert other.is_stale()
    assert not decoder.is_stale()
    assert decoder.ready.taps() is before


@pytest.mark.parametrize("pattern", LAYERS)
def test_a_bare_layer_decodes_as_by_its_own_steps(pattern: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[pattern](8).eval()
    if not layer.causal:
        pytest.skip("it has no steps")
    decoder, x = layer.decoder(), layer.example_input(2, 4)
    ours, wanted = (layer.init_state(2, capacity=4) for _ in range(2))
    with torch.no_grad():
        for x_t in x.unbind(dim=1):
            assert decoder.step_(x_t, ours).equal(layer.step_(x_t, wanted))
    assert all(map(torch.equal, leaves_of(ours), leaves_of(wanted)))


def test_a_wrong_call_of_a_decoder_is_refused() -> None:
    layer = H3(8)
    with pytest.raises(InputError, match=r"H3.step_ takes an input of shape \(batch, d_model=8\)"):
        layer.decoder().step_(torch.zeros(2, 4), layer.init_state(2, capacity=1))
    with pytest.raises(InputError, match="H3 cannot continue from this state"):
        layer.decoder().step_(torch.zeros(2, 8), RGLRU(8).init_state(2))  # type: ignore[arg-type]


def test_hooks_see_what_a_decoder_computes() -> None:
    layer = H3(8)
    decoder, seen = layer.decoder(), []
    layer.out_proj.register_forward_hook(lambda *given: seen.append(given[2]))
    y = decoder.step_(torch.zeros(2, 8), layer.init_state(2, capacity=1))
    assert [each is y for each in seen] == [True]


@pytest.mark.parametrize("pattern", ["attention", "gated_delta_net", "h3", "lstm", "mamba"])
def test_hooks_that_come_and_go_are_found(pattern: str) -> None:
    model = LanguageModel(ModelConfig(pattern, vocab_size=11, d_model=8)).eval()
    token = torch.tensor([3])
    with torch.no_grad():
        state = model.forward_chunk(torch.tensor([[1, 2]]), model.init_state(1, capacity=3))[1]
    for module in [m for m in model.modules() if isinstance(m, nn.Linear | nn.RMSNorm)]:
        handle = module.register_forward_hook(lambda *given: given[2] * 2)
        decoder = model.decoder()
        hooked = decoder.step_(token, copied(state))
        handle.remove()
        free = decoder.step_(token, copied(state))
        torch.testing.assert_close(free, model.step(token, state)[0])
        with module.register_forward_hook(lambda *given: given[2] * 2):
            torch.testing.assert_close(decoder.step_(token, copied(state)), hooked)


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
        torch.testing.assert_close(choice.logits, logits, rtol=1e-5, atol=1e-6)
        token = choice.tokens
