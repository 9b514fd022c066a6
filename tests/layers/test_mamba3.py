"""Mamba-3 against the recurrence of its paper, in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import Mamba3

WIDTH, LENGTH, HEADS, STATE = 6, 13, 3, 8


def made(**settings: Any) -> tuple[Mamba3, Tensor]:
    torch.manual_seed(0)
    layer = Mamba3(WIDTH, d_state=STATE, d_head=4, **settings).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight) / 2)
    return layer, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotation(angles: Tensor, pairs: str) -> Tensor:
    """The matrix that rotates the first pairs of entries."""
    matrix = torch.eye(STATE, dtype=angles.dtype)
    for i, angle in enumerate(angles.tolist()):
        at = [2 * i, 2 * i + 1] if pairs == "adjacent" else [i, i + STATE // 2]
        cos, sin = math.cos(angle), math.sin(angle)
        matrix[torch.tensor(at)[:, None], torch.tensor(at)] = torch.tensor(
            [[cos, -sin], [sin, cos]], dtype=matrix.dtype
        )
    return matrix


def recurrence(layer: Mamba3, x: Tensor) -> Tensor:
    """The output of one row (length, width), one token and head after the other."""
    rank = layer.mimo_rank
    z, u, b, c, delta, a, mu, omega = (x @ layer.in_proj.weight.T).split(layer.sizes, dim=-1)
    dt = F.softplus(delta + layer.dt_bias)
    g = torch.where(a >= 0, 1 + a, 1 / (1 - a)).clamp(min=layer.decay_floor)
    b, c = (t.unflatten(-1, (rank, layer.n_groups, STATE)) for t in (b, c))
    b, c = normed(b, layer.b_weight), normed(c, layer.c_weight)
    ones = torch.ones(rank, layer.d_head, dtype=x.dtype)
    outputs = []
    for head in range(HEADS):
        group = head // (HEADS // layer.n_groups)
        several = rank > 1
        spread, gates, kept = (
            getattr(layer, f"mimo_{name}")[head] if several else ones
            for name in ("in", "gate", "out")
        )
        phi = torch.zeros(layer.n_angles, dtype=x.dtype)
        s = torch.zeros(STATE, layer.d_head, dtype=x.dtype)
        latest, read = torch.zeros_like(s), []
        for t in range(LENGTH):
            step, part = dt[t, head], mu[t, head].sigmoid()
            phi = phi + math.pi * step * omega[t].tanh()
            turn = rotation(phi, layer.pairs)
            k = (b[t, :, group] + layer.b_bias[head]) @ turn.T
            q = (c[t, :, group] + layer.c_bias[head]) @ turn.T
            v = u[t].unflatten(0, (HEADS, -1))[head] * spread
            alpha = torch.exp(-step * g[t, head])
            s = alpha * s + (1 - part) * step * alpha * latest + part * step * k.T @ v
            latest = k.T @ v
            y = q @ s + layer.skip[head] * v
            if layer.norm_weight is not None:
                y = normed(y, layer.norm_weight[head])
            gate = z[t].unflatten(0, (HEADS, -1))[head] * gates
            read.append((y * F.silu(gate) * kept).sum(dim=0))
        outputs.append(torch.stack(read))
    return torch.stack(outputs, dim=1).flatten(1) @ layer.out_proj.weight.T


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_fraction": 1.0, "out_norm": True, "n_groups": 3},
        {"mimo_rank": 3, "pairs": "halves"},
        {"mimo_rank": 2, "out_norm": True},
    ],
)
def test_it_is_its_recurrence(settings: dict[str, Any]) -> None:
    layer, x = made(**settings)
    wanted = torch.stack([recurrence(layer, row) for row in x])
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-11)


def test_angles_stay_exact_over_many_tokens() -> None:
    """The angle of the state is less than a turn, however many tokens turned it."""
    layer, x = made()
    long = x.repeat(1, 40, 1).float()
    layer = layer.float()
    whole, state = layer.forward_chunk(long, layer.init_state(2))
    assert state.angle.min() >= 0
    assert state.angle.max() <= 2 * math.pi
    exact = layer.double()(long.double())
    assert (whole - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_state": 3}, "d_state must be a positive even number, got d_state=3"),
        ({"rope_fraction": 1.5}, "rope_fraction must be from 0 to 1"),
        ({"d_head": 5}, r"d_head must divide expand \* d_model, and n_groups"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Mamba3(WIDTH, **settings)
