import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import Attention

WIDTH = 8


def dense(
    layer: Attention,
    x: Tensor,
    bias: Tensor,
    rotate: Callable[[Tensor], Tensor] = lambda heads: heads,
) -> Tensor:
    """The layer from the formula, all scores at once; ``bias`` is (..., head, query, key)."""
    batch, length, _ = x.shape
    q, k, v = (x @ w.T for w in layer.qkv.weight.chunk(3))
    q, k, v = (t.reshape(batch, length, layer.n_heads, -1).transpose(1, 2) for t in (q, k, v))
    scores = rotate(q) @ rotate(k).mT / math.sqrt(layer.d_head) + bias
    future = torch.ones(length, length).triu(1).bool()
    heads = scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v
    return heads.transpose(1, 2).reshape(batch, length, -1) @ layer.out_proj.weight.T


def layer_and_input(**options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = Attention(WIDTH, **options).double()
    return layer, torch.randn(2, 7, WIDTH, dtype=torch.float64)


def test_attention_is_its_formula() -> None:
    layer, x = layer_and_input()
    torch.testing.assert_close(layer(x), dense(layer, x, torch.zeros(4, 7, 7)))


def test_alibi_penalises_the_distance() -> None:
    layer, x = layer_and_input(position="alibi")
    distance = torch.arange(7)[:, None] - torch.arange(7)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    wanted = dense(layer, x, -slopes[:, None, None] * distance)
    torch.testing.assert_close(layer(x), wanted)


def test_hard_alibi_masks_half_of_the_heads_by_default() -> None:
    layer, x = layer_and_input(position="hard_alibi")
    distance = torch.arange(7)[:, None] - torch.arange(7)
    windows = torch.tensor([1, 2, 99, 99])[:, None, None]
    bias = torch.zeros(4, 7, 7).masked_fill(distance >= windows, -math.inf)
    torch.testing.assert_close(layer(x), dense(layer, x, bias))


def turn(heads: Tensor, dims: int) -> Tensor:
    """Turn pair (t, t + dims/2) of each head by position * 10000^(-2t/dims)."""
    half = dims // 2
    pair = torch.arange(half, dtype=torch.float64)
    angle = torch.arange(heads.shape[2])[:, None] * 10_000 ** (-2 * pair / dims)
    pairs = torch.complex(heads[..., :half], heads[..., half:dims]) * torch.exp(1j * angle)
    return torch.cat([pairs.real, pairs.imag, heads[..., dims:]], dim=-1)


@pytest.mark.parametrize(("fraction", "dims"), [(1.0, 4), (0.5, 2), (0.9, 2)])
def test_rope_turns_queries_and_keys(fraction: float, dims: int) -> None:
    layer, x = layer_and_input(n_heads=2, position=f"rope(fraction={fraction})")
    wanted = dense(layer, x, torch.zeros(2, 7, 7), rotate=lambda heads: turn(heads, dims))
    torch.testing.assert_close(layer(x), wanted)


def test_the_head_and_position_options_change_no_weights() -> None:
    shapes = {
        tuple(
            (name, *tensor.shape)
            for name, tensor in Attention(WIDTH, position=p).state_dict().items()
        )
        for p in ("none", "rope", "alibi", "hard_alibi")
    }
    assert len(shapes) == 1


def test_biases_are_optional() -> None:
    assert all(m.bias is None for m in Attention(WIDTH).modules() if isinstance(m, nn.Linear))
    with_bias = Attention(WIDTH, bias=True)
    assert all(m.bias is not None for m in with_bias.modules() if isinstance(m, nn.Linear))


def test_a_chunk_keeps_the_room_for_steps_in_place() -> None:
    layer = Attention(WIDTH)
    _, state = layer.forward_chunk(torch.randn(2, 5, WIDTH), layer.init_state(2, capacity=3))
    _, state = layer.forward_chunk(torch.randn(2, 2, WIDTH), state)
    assert state.length.tolist() == [7, 7]
    assert state.k.shape[1] == 7 + 3


@pytest.mark.cpu
def test_a_step_in_place_without_room_is_refused() -> None:
    layer = Attention(WIDTH)
    state = layer.init_state(2, capacity=1)
    with torch.no_grad():
        layer.step_(torch.randn(2, WIDTH), state)
        with pytest.raises(InputError) as caught:
            layer.step_(torch.randn(2, WIDTH), state)
    assert str(caught.value) == (
        "the state has no free slot left (of 1): make it with "
        "init_state(batch_size, capacity=n) for n steps in place"
    )


def test_steps_in_place_stay_in_their_memory() -> None:
    layer = Attention(WIDTH)
    state = layer.init_state(2, capacity=4)
    places = [leaf.data_ptr() for leaf in state]
    with torch.no_grad():
        for _ in range(4):
            layer.step_(torch.randn(2, WIDTH), state)
    assert [leaf.data_ptr() for leaf in state] == places
    assert state.length.tolist() == [4, 4]


def test_the_cost_of_a_token_grows_with_the_length() -> None:
    layer = Attention(WIDTH)
    projections = 2 * 4 * WIDTH**2
    # (length + 1) / 2 keys on average; each costs a score and a weighted sum of d_model products
    assert layer.flops_per_token(9) == projections + 2 * 2 * WIDTH * 5


def test_the_cache_costs_a_key_and_a_value_per_token() -> None:
    assert Attention(WIDTH).state_bytes(10) == 10 * 2 * WIDTH * 4 + 8
    assert Attention(WIDTH).bfloat16().state_bytes(10) == 10 * 2 * WIDTH * 2 + 8


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 3}, "n_heads must divide d_model, got n_heads=3 and d_model=8"),
        (
            {"n_heads": 8, "position": "rope"},
            "rope rotates pairs of entries: fraction * d_head must be from 2 to d_head, got "
            "fraction=1.0 and d_head=1",
        ),
        (
            {"position": "rope(fraction=2)"},
            "rope rotates pairs of entries: fraction * d_head must be from 2 to d_head, got "
            "fraction=2 and d_head=2",
        ),
        (
            {"position": "hard_alibi(masked_heads=5)"},
            "masked_heads must be from 0 to n_heads=4, got 5",
        ),
        (
            {"position": "rotary"},
            "Attention wants position to be one of none, alibi, rope, hard_alibi, got 'rotary'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Attention(WIDTH, **options)
    assert str(caught.value) == message
