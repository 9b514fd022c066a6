"""The gated convolution and the options of attention and feed-forwards, against their formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import (
    MLSTM,
    NORMS,
    RGLRU,
    RWKV7,
    SLSTM,
    AnyLayer,
    Attention,
    FeedForward,
    GatedConv,
    GatedDeltaNet,
    SlidingAttention,
)


@pytest.mark.parametrize("layer", [MLSTM, RWKV7, SLSTM])
def test_heads_of_a_single_number_which_the_norm_makes_zero_are_refused(
    layer: type[AnyLayer],
) -> None:
    with pytest.raises(InputError, match="a head must have at least 2 numbers"):
        layer(8, n_heads=8, **({"expand_k": 1.0} if layer is MLSTM else {}))


def test_a_gated_convolution_is_its_equation() -> None:
    layer, x = GatedConv(4, taps=3, bias=True).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    b, c, u = layer.in_proj(x).chunk(3, dim=-1)
    y = torch.zeros_like(x)
    for t in range(6):
        for s in range(min(3, t + 1)):
            y[:, t] += layer.conv.kernel[:, s] * (b * u)[:, t - s]
    torch.testing.assert_close(layer(x), layer.out_proj(c * (y + layer.conv.bias)))


def test_an_rg_lru_is_its_equations() -> None:
    layer, x = RGLRU(4, d_inner=6, n_heads=2).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    z, u = layer.in_proj(x).chunk(2, dim=-1)
    u, _ = layer.conv.forward_chunk(u, layer.conv.init_state(2))
    h, outputs = torch.zeros(2, 6, dtype=torch.float64), []
    for t in range(6):
        blocks = u[:, t].unflatten(-1, (2, 1, 3))
        r = ((blocks @ layer.decay_weight).squeeze(-2) + layer.decay_bias).sigmoid().flatten(1)
        i = ((blocks @ layer.input_weight).squeeze(-2) + layer.input_bias).sigmoid().flatten(1)
        a = torch.exp(-8 * r * F.softplus(layer.rate))
        h = a * h + (1.0 if t == 0 else (1 - a**2).sqrt()) * i * u[:, t]
        outputs.append(h)
    gate = F.gelu(z, approximate="tanh")
    torch.testing.assert_close(layer(x), layer.out_proj(torch.stack(outputs, dim=1) * gate))


@pytest.mark.parametrize("bias", [-200.0, -43.0, -42.0, -41.0])  # at -200, gates are zero
def test_an_rg_lru_that_hardly_forgets_is_finite_and_has_finite_gradients(bias: float) -> None:
    layer, x = RGLRU(64), torch.randn(2, 5, 64)
    with torch.no_grad():
        layer.decay_bias.fill_(bias)
    layer(x).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_a_norm_with_an_offset_is_the_usual_one_around_one() -> None:
    usual, offset = NORMS["rms"](6), NORMS["rms_offset"](6)
    with torch.no_grad():
        offset.weight.copy_(torch.randn(6))
        usual.weight.copy_(1 + offset.weight)
    x = torch.randn(3, 6)
    torch.testing.assert_close(offset(x), usual(x))
    small = NORMS["rms_offset"](6).bfloat16()
    torch.nn.init.constant_(small.weight, 2.0**-10)  # 1 + 2^-10 is 1 in bfloat16
    wide = torch.ones(1, 6).bfloat16() * 3
    assert small(wide).dtype == torch.bfloat16
    torch.testing.assert_close(small(wide), torch.ones(1, 6).bfloat16())


def test_gated_attention_weighs_each_head_by_a_projection_of_the_input() -> None:
    gated, plain = Attention(8, n_heads=2, gated=True), Attention(8, n_heads=2)
    weights, x = gated.state_dict(), torch.randn(2, 5, 8)
    q, kv = weights["qkv.weight"].split([16, 16])
    q, gate = q.unflatten(0, (2, 2, 4)).unbind(dim=1)
    plain.load_state_dict(
        {"qkv.weight": torch.cat([q.flatten(0, 1), kv]), "out_proj.weight": torch.eye(8)}
    )
    heads = plain(x) * (x @ gate.flatten(0, 1).T).sigmoid()
    torch.testing.assert_close(gated(x), gated.out_proj(heads))


def test_a_delta_net_with_few_key_heads_is_one_with_repeated_keys() -> None:
    few = GatedDeltaNet(8, n_heads=4, n_key_heads=2, d_key=3)
    many, weights = GatedDeltaNet(8, n_heads=4, d_key=3), few.state_dict()
    for name in ("in_proj.weight", "conv.kernel"):
        q, k, rest = weights[name].tensor_split([6, 12])
        q, k = (t.unflatten(0, (2, 3)).repeat_interleave(2, dim=0).flatten(0, 1) for t in (q, k))
        weights[name] = torch.cat([q, k, rest])
    many.load_state_dict(weights)
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(few(x), many(x))


@pytest.mark.parametrize("layer", [Attention, SlidingAttention])
def test_grouped_queries_are_attention_with_repeated_keys(layer: type) -> None:
    few, many = layer(8, n_heads=4, n_kv_heads=2), layer(8, n_heads=4)

    def repeated(rows: Tensor, parts: int) -> Tensor:
        heads = rows.unflatten(0, (parts, 2, 2))
        return heads.repeat_interleave(2, dim=1).flatten(0, 2)

    weights = few.state_dict()
    if layer is Attention:
        q, kv = weights["qkv.weight"].split([8, 8])
        weights["qkv.weight"] = torch.cat([q, repeated(kv, 2)])
    else:
        weights["kv_proj.weight"] = repeated(weights["kv_proj.weight"], 2)
    many.load_state_dict(weights)
    x = torch.randn(2, 7, 8)
    torch.testing.assert_close(few(x), many(x))
    assert few.state_bytes(5) - 8 == (many.state_bytes(5) - 8) / 2


def test_normalised_queries_do_not_depend_on_the_size_of_the_input() -> None:
    layer = Attention(8, n_heads=2, qk_norm="rms(eps=1e-12)")
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(layer(10 * x), 10 * layer(x), rtol=1e-4, atol=1e-5)


def test_the_scale_of_the_scores_replaces_the_usual_one() -> None:
    for layer in (Attention, SlidingAttention):
        torch.manual_seed(0)
        usual = layer(8, n_heads=2)
        torch.manual_seed(0)
        same, flat = layer(8, n_heads=2, score_scale=0.5), layer(8, n_heads=2, score_scale=0.0)
        flat.load_state_dict(usual.state_dict())
        same.load_state_dict(usual.state_dict())
        x = torch.randn(1, 5, 8)
        torch.testing.assert_close(same(x), usual(x))
        assert not torch.allclose(flat(x), usual(x))


@pytest.mark.parametrize(("where", "names"), [("qkv", {"qkv.bias"}), ("out", {"out_proj.bias"})])
def test_single_projections_can_have_biases(where: str, names: set[str]) -> None:
    found = Attention(8, bias=where).state_dict()
    assert {name for name in found if name.endswith("bias")} == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads, got n_kv_heads=3 and n_heads=4"),
        ({"position": "rope", "d_head": 5}, "width of a head must be even, got 5"),
        ({"position": "rope(scaling=linear(factor=0))"}, "linear wants factor to be a fin"),
        ({"position": "rope(scaling=llama3(low=5))"}, "needs 0 < low < high"),
        ({"position": "rope(scaling=yarn(slow=40))"}, "needs 0 < slow < fast"),
        ({"position": "rope(base=1, scaling=yarn)"}, "a base above 1"),
        ({"position": "rope(bas=1)"}, "unknown keyword of rope 'bas'"),
        ({"position": "rope(scaling=ntk(factor=2))"}, "scaling to be one of none, linear, llama3"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    for layer in (Attention, SlidingAttention):
        with pytest.raises(InputError, match=message):
            layer(8, **options)
    with pytest.raises(InputError, match="leave score_scale out"):
        SlidingAttention(8, qk_norm=True, score_scale=1.0)


def test_gates_and_squares_are_their_formulas() -> None:
    x = torch.randn(3, 8)
    gated = FeedForward(8, activation="geglu", d_hidden=5)
    gate, h = F.linear(x, gated.in_proj.weight).chunk(2, dim=-1)
    torch.testing.assert_close(gated(x), gated.out_proj(F.gelu(gate, approximate="tanh") * h))
    squared = FeedForward(8, activation="relu2")
    torch.testing.assert_close(squared(x), squared.out_proj(squared.in_proj(x).clamp(min=0) ** 2))
