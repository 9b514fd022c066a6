"""Linear attention with a decay: each layer against the recurrence of its paper, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import (
    HGRN2,
    MLSTM,
    GatedLinearAttention,
    LightningAttention,
    LinearAttention,
    Retention,
)
from tests.layers.recurrences import HEADS, LENGTH, SAME, WIDTH, heads, made, normed


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """S_t = diag(decay_t) S_(t-1) + k_t v_t', y_t = S_t' q_t, token by token."""
    s, outputs = torch.zeros(2, HEADS, k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(LENGTH):
        s = decay[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(outputs, dim=1)


def test_retention_is_its_recurrence() -> None:
    layer, x = made(Retention(WIDTH, n_heads=HEADS))
    q, k, v, z = (x @ layer.in_proj.weight.T).split([8, 8, 16, 16], dim=-1)
    q, k, v = heads(q), heads(k), heads(v)
    angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def turned(t: Tensor) -> Tensor:
        pairs = torch.complex(t[..., :2], t[..., 2:]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    decay = torch.tensor([1 - 2.0**-5, 1 - 2.0**-6], dtype=torch.float64)
    y = recurrence(turned(q), turned(k) / 2, v, decay[:, None].expand(2, LENGTH, HEADS, 4))
    gated = normed(y, layer.norm).flatten(2) * F.silu(z)
    torch.testing.assert_close(layer(x), gated @ layer.out_proj.weight.T, **SAME)


def test_lightning_attention_is_its_recurrence() -> None:
    layer, x = made(LightningAttention(WIDTH, n_heads=HEADS, decay_scale=0.5))
    q, k, v = heads(F.silu(x @ layer.qkv.weight.T)).split(4, dim=-1)
    decay = torch.exp(-0.5 * torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64))
    y = recurrence(q, k, v, decay[:, None].expand_as(q)).flatten(2)
    gated = normed(y, layer.norm) * (x @ layer.gate_proj.weight.T).sigmoid()
    torch.testing.assert_close(layer(x), gated @ layer.out_proj.weight.T, **SAME)


def test_lightning_attention_is_that_of_minimax() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=4,
        num_hidden_layers=2,
        block_size=5,
        layer_types=["linear_attention", "full_attention"],
    )
    theirs = MiniMaxLightningAttention(config, layer_idx=0).double()
    layer, x = made(LightningAttention(WIDTH, n_heads=HEADS, decay_scale=1 + 1e-5))
    names = {"qkv_proj": "qkv", "output_gate": "gate_proj", "norm": "norm", "out_proj": "out_proj"}
    weights = layer.state_dict()
    theirs.load_state_dict(
        {f"{a}.weight": weights[f"{b}.weight"] for a, b in names.items()}, strict=False
    )
    # their decays are buffers in float32
    for name, value in zip(
        ("query_decay", "key_decay", "diagonal_decay"),
        theirs.decay_factors(theirs.get_slope_rate().double()),
        strict=True,
    ):
        setattr(theirs, name, value)
    theirs.slope_rate = theirs.get_slope_rate().double()
    wanted, _ = theirs(x, None, None)
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-5)


def test_gated_linear_attention_is_its_recurrence() -> None:
    layer, x = made(GatedLinearAttention(WIDTH, n_heads=HEADS, rank=3, temperature=2.0))
    q, k, v, z, low = (x @ layer.in_proj.weight.T).split([4, 4, 8, 8, 3], dim=-1)
    alpha = (low @ layer.decay_proj.weight.T + layer.decay_proj.bias).sigmoid().sqrt()
    y = recurrence(heads(q) / 2**0.5, heads(k), heads(v), heads(alpha))
    gated = normed(y, layer.norm).flatten(2) * F.silu(z)
    torch.testing.assert_close(layer(x), gated @ layer.out_proj.weight.T, **SAME)


@pytest.mark.parametrize("bound", [0.0, 0.4])
def test_hgrn2_is_its_recurrence(bound: float) -> None:
    layer, x = made(HGRN2(WIDTH, n_heads=HEADS, expand_k=0.5, lower_bound=bound))
    q, f, v = (x @ layer.in_proj.weight.T).split([4, 4, 8], dim=-1)
    forget = bound + (1 - bound) * f.sigmoid()
    y = recurrence(heads(F.silu(q)), 1 - heads(forget), heads(v), heads(forget)).flatten(2)
    wanted = normed(y, layer.norm) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), wanted, **SAME)


@torch.no_grad()
def test_bounds_of_official_hgrn2_layers_are_learned_bounds() -> None:
    """There the bounds are the cumulative softmax over the layers, less the first."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bounds = logits.softmax(0).cumsum(0) - logits.softmax(0)[0]
    for bound in bounds[1:]:
        options = {"expand_k": 0.5, "lower_bound": 0.5, "learns_bound": True}
        layer, x = made(HGRN2(WIDTH, n_heads=HEADS, **options))
        layer.bound.copy_(bound.logit())
        q, f, v = (x @ layer.in_proj.weight.T).split([4, 4, 8], dim=-1)
        log_forget = torch.logaddexp(bound.log(), torch.log1p(-bound) + F.logsigmoid(f))
        forget = log_forget.exp()
        y = recurrence(heads(F.silu(q)), 1 - heads(forget), heads(v), heads(forget)).flatten(2)
        wanted = normed(y, layer.norm) @ layer.out_proj.weight.T
        torch.testing.assert_close(layer(x), wanted, **SAME)


def gates_of(layer: MLSTM, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values, input of the output gate, and the gates i and f."""
    *signals, both = (x @ layer.in_proj.weight.T).split(layer.sizes, dim=-1)
    cap = layer.soft_cap
    return (*signals, *(cap * torch.tanh((both + layer.gate_bias) / cap)).chunk(2, dim=-1))


@pytest.mark.parametrize("cap", [1.0, 15.0])
def test_an_mlstm_is_its_recurrence(cap: float) -> None:
    layer, x = made(MLSTM(WIDTH, n_heads=HEADS, soft_cap=cap))
    q, k, v, z, i, f = gates_of(layer, 4 * x)
    q, k, v = heads(q) / 2**0.5, heads(k), heads(v)
    c, n, outputs = torch.zeros(2, HEADS, 2, 4).double(), torch.zeros(2, HEADS, 2).double(), []
    for t in range(LENGTH):
        keep, write = f[:, t].sigmoid()[..., None], i[:, t].exp()[..., None] * k[:, t]
        c = keep[..., None] * c + write[..., :, None] * v[:, t, :, None, :]
        n = keep * n + write
        scale = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], c) / scale)
    y = torch.stack(outputs, dim=1)
    y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.norm_weight
    wanted = (y.flatten(2) * z.sigmoid()) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(4 * x), wanted, **SAME)


def test_an_mlstm_is_that_of_transformers() -> None:
    from transformers import xLSTMConfig
    from transformers.models.xlstm import modeling_xlstm

    config = xLSTMConfig(
        hidden_size=WIDTH, num_heads=HEADS, chunkwise_kernel="chunkwise--native_autograd"
    )
    theirs = modeling_xlstm.xLSTMLayer(config).eval()
    layer, x = made(MLSTM(WIDTH, n_heads=HEADS))
    q, k, v, z, both = layer.in_proj.weight.split(layer.sizes)
    weights = {"q": q, "k": k, "v": v, "ogate_preact": z, "out_proj": layer.out_proj.weight}
    weights |= dict(zip(("igate_preact", "fgate_preact"), both.chunk(2), strict=True))
    weights["multihead_norm"] = layer.norm_weight.flatten()
    named = {f"{name}.weight": t.float() for name, t in weights.items()}
    biases = layer.gate_bias.float().chunk(2)
    named |= {"igate_preact.bias": biases[0], "fgate_preact.bias": biases[1]}
    theirs.load_state_dict(named)
    x = torch.randn(2, 64, WIDTH)  # their chunks are whole
    with torch.no_grad():
        wanted, _ = theirs(x)
        torch.testing.assert_close(layer.float()(x), wanted, rtol=0, atol=2e-5)


def test_gates_of_any_size_keep_an_mlstm_finite() -> None:
    layer, x = MLSTM(WIDTH, n_heads=HEADS, soft_cap=1000.0), 100 * torch.randn(2, 50, WIDTH)
    y = layer(x)
    y.sum().backward()
    assert bool(y.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_lightning_attention_that_never_decays_adds_up() -> None:
    """Then its heads are those of linear attention without a normaliser."""
    layer, x = made(LightningAttention(WIDTH, n_heads=HEADS, decay_scale=0.0))
    state = layer.init_state(2)
    _, after = layer.forward_chunk(x, state)
    _, k, v = heads(F.silu(x @ layer.qkv.weight.T)).split(4, dim=-1)
    torch.testing.assert_close(after.s, torch.einsum("bthk,bthv->bhkv", k, v))
    assert type(after) is type(LinearAttention(WIDTH).init_state(1))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (Retention, {"n_heads": 8}, "d_model / n_heads must be even, got 1"),
        (Retention, {"expand_v": 0.1}, "n_heads must divide expand_v"),
        (GatedLinearAttention, {"n_heads": 3}, "n_heads must divide expand_k"),
        (HGRN2, {"lower_bound": 1.0}, "wants lower_bound to be a finite number from 0 to below 1"),
        (HGRN2, {"learns_bound": True}, "begins at lower_bound, which must be above 0, got 0"),
    ],
)
def test_impossible_options_are_refused(layer: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layer(WIDTH, **options)
