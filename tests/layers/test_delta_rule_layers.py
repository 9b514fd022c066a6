"""Layers of the delta rule: each against the recurrence of its paper, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import RWKV7, GatedDeltaNet, KimiDeltaAttention
from tests.layers.recurrences import HEADS, LENGTH, SAME, WIDTH, heads, made, normed


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(layer: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for s in range(layer.conv.kernel.shape[1]):
        y[:, s:] += layer.conv.kernel[:, s] * x[:, : LENGTH - s]
    return F.silu(y)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def test_kimi_delta_attention_is_its_recurrence() -> None:
    layer, x = made(KimiDeltaAttention(WIDTH, n_heads=HEADS, rank=3))
    mixed, low, beta, gate = (x @ layer.in_proj.weight.T).split([24, 3, 2, 3], dim=-1)
    q, k, v = (heads(t) for t in convolved(layer, mixed).split(8, dim=-1))
    steps = F.softplus(low @ layer.decay_proj.weight.T + layer.dt_bias)
    alpha = torch.exp(-layer.a_log.exp()[:, None] * heads(steps))
    q, k, beta = unit(q) / 2, unit(k), beta.sigmoid()[..., None, None]
    s, outputs = torch.zeros(2, HEADS, 4, 4, dtype=x.dtype), []
    for t in range(LENGTH):
        kept = torch.eye(4, dtype=x.dtype) - beta[:, t] * outer(k[:, t], k[:, t])
        s = kept @ (alpha[:, t, :, :, None] * s) + beta[:, t] * outer(k[:, t], v[:, t])
        outputs.append((s.mT @ q[:, t, :, :, None])[..., 0])
    y = normed(torch.stack(outputs, dim=1), layer.norm).flatten(2)
    wanted = (y * (gate @ layer.gate_proj.weight.T).sigmoid()) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), wanted, **SAME)


def test_kimi_delta_attention_is_that_of_transformers() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=4,
        linear_num_heads=HEADS,
        rms_norm_eps=1e-5,
    )
    theirs = KimiLinearDeltaAttention(config, layer_idx=0)
    layer, x = made(KimiDeltaAttention(WIDTH, n_heads=HEADS))
    q, k, v, low, beta, gate = layer.in_proj.weight.split([8, 8, 8, 4, 2, 4])
    weights = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "b_proj.weight": beta,
        "g_a_proj.weight": gate,
        "g_b_proj.weight": layer.gate_proj.weight,
        "conv1d.weight": layer.conv.kernel.flip(-1)[:, None],
        "forget_gate.f_a_proj.weight": low,
        "forget_gate.f_b_proj.weight": layer.decay_proj.weight,
        "forget_gate.dt_bias": layer.dt_bias,
        "forget_gate.A_log": layer.a_log.view(1, 1, -1, 1),
        "o_norm.weight": layer.norm.weight,
        "o_proj.weight": layer.out_proj.weight,
    }
    theirs.load_state_dict({name: t.float() for name, t in weights.items()})
    wanted = theirs(x.float())
    torch.testing.assert_close(layer(x).float(), wanted, rtol=0, atol=1e-5)


def test_rwkv7_is_its_recurrence() -> None:
    layer, x = made(RWKV7(WIDTH, n_heads=HEADS, rank=3))
    before = F.pad(x[:, :-1], (0, 0, 1, 0))
    r, w, k, v, a, g = (x + mu * (before - x) for mu in layer.mix)
    w = torch.exp(
        -torch.exp(torch.tensor(-0.5, dtype=x.dtype))
        * (layer.decay_bias + layer.decay_out(layer.decay_in(w).tanh())).sigmoid()
    )
    a = (layer.rate_bias + layer.rate_out(layer.rate_in(a))).sigmoid()
    g = layer.gate_out(layer.gate_in(g).sigmoid())
    r, k, v = r @ layer.r_proj.weight.T, k @ layer.k_proj.weight.T, v @ layer.v_proj.weight.T
    kappa = F.normalize(heads(layer.removal * k), dim=-1)
    r, w, v, a = heads(r), heads(w), heads(v), heads(a)
    k = heads(k) * (1 + (a - 1) * heads(layer.writing))
    s, outputs = torch.zeros(2, HEADS, 4, 4, dtype=x.dtype), []  # the paper's: (value, key)
    for t in range(LENGTH):
        kept = torch.diag_embed(w[:, t]) - outer(kappa[:, t], a[:, t] * kappa[:, t])
        s = s @ kept + outer(v[:, t], k[:, t])
        outputs.append((s @ r[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, dim=1)
    centred = y - y.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 4e-5).sqrt()
    y = y.flatten(2) * layer.norm.weight + layer.norm.bias
    bonus = (r * layer.bonus * k).sum(-1, keepdim=True) * v
    wanted = ((y + bonus.flatten(2)) * g) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), wanted, **SAME)


@pytest.mark.parametrize("products", [1, 2])
def test_without_gates_a_value_replaces_the_old_value_of_its_key_and_nothing_decays(
    products: int,
) -> None:
    layer, x = made(
        GatedDeltaNet(WIDTH, n_heads=HEADS, expand_v=1, gated=False, n_products=products)
    )
    assert {name for name, _ in layer.named_parameters()} == {
        "in_proj.weight",
        "conv.kernel",
        "norm.weight",
        "out_proj.weight",
    }
    mixed, beta = (x @ layer.in_proj.weight.T).split([8 + 16 * products, 2 * products], dim=-1)
    q, k, v = convolved(layer, mixed).split([8, 8 * products, 8 * products], dim=-1)
    q, k, v = unit(heads(q)) / 2, unit(k.unflatten(-1, (-1, 4))), v.unflatten(-1, (-1, 4))
    s, outputs = torch.zeros(2, HEADS, 4, 4, dtype=x.dtype), []
    for t in range(LENGTH):
        for i in range(products):
            these = slice(HEADS * i, HEADS * (i + 1))
            key, value, rate = k[:, t, these], v[:, t, these], beta[:, t, these].sigmoid()
            old = (s.mT @ key[..., None])[..., 0]
            s = s + rate[..., None, None] * outer(key, value - old)
        outputs.append((s.mT @ q[:, t, :, :, None])[..., 0])
    y = normed(torch.stack(outputs, dim=1), layer.norm).flatten(2)
    torch.testing.assert_close(layer(x), y @ layer.out_proj.weight.T, **SAME)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_delta_product_applies_its_reflections_one_after_the_other(key_heads: int) -> None:
    layer, x = made(
        GatedDeltaNet(
            WIDTH, n_heads=HEADS, n_key_heads=key_heads, d_key=4, n_products=3, reflects=True
        )
    )
    keys = 4 * key_heads
    sizes = [4 * keys + 48, 16, 2, 6]
    mixed, z, step, beta = (x @ layer.in_proj.weight.T).split(sizes, dim=-1)
    q, k, v = convolved(layer, mixed).split([keys, 3 * keys, 48], dim=-1)
    q = unit(heads(q, key_heads)).repeat_interleave(HEADS // key_heads, dim=-2) / 2
    k = unit(k.unflatten(-1, (3, key_heads, 4))).repeat_interleave(HEADS // key_heads, dim=-2)
    v, beta = v.unflatten(-1, (3, HEADS, 8)), 2 * beta.unflatten(-1, (3, HEADS)).sigmoid()
    alpha = torch.exp(-layer.a_log.exp() * F.softplus(step + layer.dt_bias))
    s, outputs = torch.zeros(2, HEADS, 4, 8, dtype=x.dtype), []
    for t in range(LENGTH):
        s = alpha[:, t, :, None, None] * s
        for i in range(3):
            key, b = k[:, t, i], beta[:, t, i, :, None, None]
            kept = torch.eye(4, dtype=x.dtype) - b * outer(key, key)
            s = kept @ s + b * outer(key, v[:, t, i])
        outputs.append((s.mT @ q[:, t, :, :, None])[..., 0])
    y = normed(torch.stack(outputs, dim=1), layer.norm).flatten(2)
    wanted = (y * F.silu(z)) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), wanted, **SAME)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (KimiDeltaAttention, {"n_heads": 3}, "n_heads must divide d_model"),
        (RWKV7, {"n_heads": 3}, "n_heads must divide d_model"),
    ],
)
def test_impossible_options_are_refused(layer: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layer(WIDTH, **options)
