from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import H3, nbytes
from stateline.layers.mixers.h3 import H3State
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


def layer_and_input(d_head: int, **options: Any) -> tuple[H3, Tensor]:
    """All parameters random."""
    torch.manual_seed(0)
    layer = H3(8, d_state=4, d_head=d_head, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer, torch.randn(2, 11, 8, dtype=torch.float64)


def shift_response(layer: H3, length: int) -> Tensor:
    """Impulse responses of the shift SSMs, by their recurrence: (channel, length)."""
    b, c = layer.shift.b, layer.shift.c
    shift = torch.eye(b.shape[1], dtype=b.dtype).roll(1, dims=0)
    shift[0] = 0
    state, response = b.T, []
    for _ in range(length):
        response.append((c.T * state).sum(dim=0))
        state = shift @ state
    return torch.stack(response, dim=1)


def diagonal_response(layer: H3, length: int) -> Tensor:
    """Impulse responses of the diagonal SSMs, bilinear: (head, length)."""
    ssm = layer.diagonal
    dt = ssm.log_dt.exp()[:, None]
    z = dt * torch.complex(-ssm.log_decay.exp(), ssm.frequency)
    a_bar = (1 + z / 2) / (1 - z / 2)
    b_bar = dt * torch.view_as_complex(ssm.b) / (1 - z / 2)
    powers = a_bar[..., None] ** torch.arange(length)
    return 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(ssm.c) * b_bar, powers).real


def toeplitz(response: Tensor) -> Tensor:
    """The matrices (row, t, s) that convolve with each response."""
    length = response.shape[-1]
    lag = torch.arange(length)[:, None] - torch.arange(length)
    return response[:, lag.clamp(min=0)] * (lag >= 0)


def dense(layer: H3, x: Tensor) -> Tensor:
    """Section 3.2 of the fact sheet, entry by entry."""
    batch, length, width = x.shape
    d_head, heads = layer.d_head, width // layer.d_head
    q, k, v = (
        x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    )
    shift = toeplitz(shift_response(layer, length))
    k = torch.einsum("dts,bsd->btd", shift, k) + layer.shift.skip * k
    q, k, v = (t.reshape(batch, length, heads, d_head) for t in (q, k, v))
    o = torch.zeros(batch, length, heads, d_head, dtype=x.dtype)
    for h, matrix in enumerate(toeplitz(diagonal_response(layer, length))):
        for i in range(d_head):
            for j in range(d_head):
                kv = k[:, :, h, i] * v[:, :, h, j]
                remembered = kv @ matrix.T + layer.diagonal.skip[h] * kv
                o[:, :, h, j] += remembered * q[:, :, h, i]
    return o.reshape(batch, length, width) @ layer.out_proj.weight.T + layer.out_proj.bias


@pytest.mark.parametrize("d_head", [1, 2, 4, 8])
def test_h3_is_the_layer_of_the_paper(d_head: int) -> None:
    layer, x = layer_and_input(d_head)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(layer, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d_head", [1, 4])
def test_the_state_has_a_constant_size(d_head: int) -> None:
    layer, x = layer_and_input(d_head)
    state = layer.init_state(2)
    for _ in range(3):
        state = layer.forward_chunk(x, state)[1]
        assert isinstance(state, H3State)
        assert state.shift.past.shape == (2, 3, 8)
        assert state.diagonal.h.shape == (2, d_head, d_head, 8 // d_head, 2, 2)
        assert nbytes(state) == 2 * layer.state_bytes(10_000)


def test_heads_may_share_their_transitions() -> None:
    layer, x = layer_and_input(2, n_ssm=2)
    alone, _ = layer_and_input(2)
    weights = layer.state_dict()
    for name in ("diagonal.log_decay", "diagonal.frequency", "diagonal.b"):
        weights[name] = weights[name].tile(2, *[1] * (weights[name].ndim - 1))
    alone.load_state_dict(weights)
    torch.testing.assert_close(layer(x), alone(x))


def test_several_signals_of_a_state_add_up_in_the_last_projection() -> None:
    layer, x = layer_and_input(2, n_outputs=2)
    whole, wanted = layer.state_dict(), layer.out_proj.bias
    for half in range(2):
        single, _ = layer_and_input(2)
        weights = dict(whole)
        for name in ("diagonal.c", "diagonal.skip"):
            weights[name] = whole[name].chunk(2)[half]
        weights["out_proj.weight"] = whole["out_proj.weight"].chunk(2, dim=1)[half]
        weights["out_proj.bias"] = torch.zeros(8)
        single.load_state_dict(weights)
        wanted = wanted + single(x)
    torch.testing.assert_close(layer(x), wanted)


def test_several_signals_do_not_enlarge_the_state() -> None:
    assert H3(8, n_outputs=3).state_bytes(1) == H3(8).state_bytes(1)


@pytest.mark.cpu
def test_a_bounded_layer_bounds_the_model_around_it() -> None:
    config = ModelConfig("ladder(h3(max_len=6)) h3(max_len=9) h3", vocab_size=5, d_model=8)
    model = LanguageModel(config)
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    _, state = model.forward_chunk(tokens[:, :6], model.init_state(1))
    for call in (lambda: model(tokens), lambda: model.step(tokens[:, 0], state)):
        with pytest.raises(InputError, match="made for max_len=6 tokens, got 7"):
            call()


@pytest.mark.parametrize("d_head", [3, 16])
def test_heads_must_fit_the_width(d_head: int) -> None:
    with pytest.raises(InputError) as caught:
        H3(8, d_head=d_head)
    assert str(caught.value) == f"d_head must divide d_model, got d_head={d_head} and d_model=8"
