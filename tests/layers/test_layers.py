"""What the smaller layers compute."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import prune

from stateline.errors import InputError
from stateline.layers import (
    H3,
    LSTM,
    NORMS,
    S4D,
    FeedForward,
    Ladder,
    ParallelResidual,
    Residual,
    Stack,
)

WIDTH = 6
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("gelu", lambda h: F.gelu(h, approximate="tanh")),
        ("gelu_exact", lambda h: h * (1 + torch.erf(h / 2**0.5)) / 2),
        ("relu", F.relu),
    ],
)
def test_a_feed_forward_widens_and_narrows(
    activation: Any, function: Callable[[Tensor], Tensor]
) -> None:
    layer = FeedForward(WIDTH, activation=activation)
    h = function(X @ layer.in_proj.weight.T + layer.in_proj.bias)
    assert h.shape[-1] == 4 * WIDTH
    torch.testing.assert_close(layer(X), h @ layer.out_proj.weight.T + layer.out_proj.bias)


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    layer = FeedForward(WIDTH, activation="swiglu")
    gate, h = (X @ w.T for w in layer.in_proj.weight.chunk(2))
    wanted = (gate * torch.sigmoid(gate) * h) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(X), wanted)
    assert layer.in_proj.bias is layer.out_proj.bias is None


@pytest.mark.parametrize("width", [48, 64, 100])
def test_swiglu_has_about_as_many_parameters_as_gelu(width: int) -> None:
    gelu, swiglu = (
        sum(p.numel() for p in FeedForward(width, activation=activation).parameters())
        for activation in ("gelu", "swiglu")
    )
    assert swiglu == pytest.approx(gelu, rel=0.05)


@pytest.mark.usefixtures("unannotated")
def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(InputError, match=r"activation to be one of gelu, .* got 'glu'"):
        FeedForward(WIDTH, activation="glu")  # type: ignore[arg-type]


def test_an_lstm_is_pytorchs_lstm_with_its_weights() -> None:
    layer, theirs = LSTM(WIDTH, n_layers=2), torch.nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X), theirs(X)[0])


def test_an_lstm_uses_its_pruned_weights_in_their_places() -> None:
    layer = LSTM(WIDTH, n_layers=2)
    wanted = copy.deepcopy(layer)
    for name in ("weight_ih_l0", "weight_hh_l1"):
        prune.l1_unstructured(layer, name, 0.5)
        with torch.no_grad():
            wanted.get_parameter(name).copy_(getattr(layer, name))
    torch.testing.assert_close(layer(X), wanted(X))


def test_lstm_weights_begin_uniform_within_the_root_of_the_width() -> None:
    for parameter in LSTM(16).parameters():
        assert 0.2 < parameter.abs().max() <= 0.25


def test_s4d_mixes_the_channels_after_the_nonlinearity() -> None:
    layer = S4D(WIDTH, d_state=4)
    wanted = F.gelu(layer.ssm(X)) @ layer.out_proj.weight.T + layer.out_proj.bias
    torch.testing.assert_close(layer(X), wanted)


def test_s4d_and_h3_discretise_as_their_papers_do() -> None:
    assert S4D(WIDTH).ssm.settings.discretization == "zoh"
    assert H3(WIDTH).diagonal.settings.discretization == "bilinear"


def test_a_residual_adds_the_layer_of_the_norm() -> None:
    layer, norm = FeedForward(WIDTH), NORMS["layer"](WIDTH)
    torch.testing.assert_close(Residual(layer, norm)(X), X + layer(norm(X)))


def test_parallel_branches_see_the_same_input() -> None:
    first, second = FeedForward(WIDTH), LSTM(WIDTH)
    norms = [torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)]
    torch.nn.init.normal_(norms[1].weight)  # so that it matters which branch has which
    block = ParallelResidual(Residual(first, norms[0]), Residual(second, norms[1]))
    torch.testing.assert_close(block(X), X + first(norms[0](X)) + second(norms[1](X)))
    assert block.state_bytes(5) == second.state_bytes(5)
    assert block.flops_per_token(5) == first.flops_per_token(5) + second.flops_per_token(5)


def test_a_stack_applies_its_layers_in_order() -> None:
    first, second = FeedForward(WIDTH), LSTM(WIDTH)
    assert torch.equal(Stack(first, second)(X), second(first(X)))


def test_a_ladder_applies_its_core_again_and_again_with_the_same_weights() -> None:
    core = Stack(FeedForward(WIDTH), LSTM(WIDTH))
    ladder = Ladder(core, passes=3)
    assert torch.equal(ladder(X), core(core(core(X))))
    assert sum(p.numel() for p in ladder.parameters()) == sum(p.numel() for p in core.parameters())


def test_a_ladder_keeps_a_state_per_pass_and_pays_per_pass() -> None:
    core = LSTM(WIDTH)
    ladder = Ladder(core, passes=3)
    assert len(ladder.init_state(2)) == 3
    assert ladder.state_bytes(5) == 3 * core.state_bytes(5)
    assert ladder.flops_per_token(5) == 3 * core.flops_per_token(5)


def test_norms_normalise_each_position() -> None:
    centred = X - X.mean(dim=-1, keepdim=True)
    scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(NORMS["layer"](WIDTH)(X), scaled)
    root = X / (X.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(NORMS["rms"](WIDTH)(X), root)
    assert torch.equal(NORMS["none"](WIDTH)(X), X)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_what_a_norm_adds_to_the_variance_can_be_set(norm: str) -> None:
    tiny = 1e-3 * X
    assert NORMS[norm](WIDTH, 1.0)(tiny).abs().max() < 0.01 < NORMS[norm](WIDTH)(tiny).abs().max()
