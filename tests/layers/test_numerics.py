"""Initial values, weight decay, costs and far positions, as in the official code of each layer."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stateline.errors import InputError
from stateline.layers import (
    DSS,
    HGRN2,
    MLSTM,
    RWKV7,
    S4D,
    S4SSM,
    S5SSM,
    AnyLayer,
    Attention,
    BlockRecurrent,
    CachedStaircase,
    DiagonalSSM,
    Feedback,
    FeedForward,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    LongConv,
    Retention,
    SlidingAttention,
    Stack,
)
from stateline.layers.context import mean_visible
from stateline.layers.mixers.diagonal_ssm import convolution_flops
from stateline.layers.mixers.short_conv import ShortConv
from stateline.ops import use_backend
from stateline.ops.positions import rotate
from stateline.train.config import TrainConfig
from stateline.train.optimizer import parameter_groups

WIDTH = 8


def group_of(layer: AnyLayer, parameter: Tensor) -> dict[str, Any]:
    groups = parameter_groups(layer, TrainConfig(weight_decay=0.1))
    return next(g for g in groups if any(p is parameter for p in g["params"]))


def test_queries_of_the_delta_net_are_scaled_by_the_root_of_the_key_size() -> None:
    default, unscaled = (
        GatedDeltaNet(WIDTH, n_heads=2),
        GatedDeltaNet(WIDTH, n_heads=2, query_scale=1.0),
    )
    assert default.query_scale == 4**-0.5
    unscaled.load_state_dict(default.state_dict())
    mixed = torch.randn(1, 3, default.conv.d_model)
    others = torch.zeros(3, 1, 3, 2)
    (a,), (b,) = (layer.signals(mixed, *others)[0] for layer in (default, unscaled))
    torch.testing.assert_close(a.q, b.q / 2)
    assert torch.equal(a.k, b.k)
    assert torch.equal(a.v, b.v)
    with pytest.raises(InputError, match="wants query_scale to be a finite number above 0 or none"):
        GatedDeltaNet(WIDTH, query_scale=0.0)


def test_decay_rates_of_the_delta_net_begin_uniform_from_0_to_16() -> None:
    rate = GatedDeltaNet(4000, n_heads=4000, expand_v=1, d_conv=1).a_log.exp()
    assert 0 < rate.min() < 0.1
    assert 15.9 < rate.max() <= 16.001
    assert rate.mean().item() == pytest.approx(8, rel=0.05)


def test_both_steps_of_a_dss_channel_begin_equal() -> None:
    log_dt = DSS(WIDTH, d_state=2).ssm.log_dt
    assert log_dt.shape == (WIDTH, 2)
    assert torch.equal(log_dt[:, 0], log_dt[:, 1])
    assert len(log_dt[:, 0].unique()) == WIDTH


def test_b_of_s4d_with_legs_is_that_of_hippo_bounded_by_two() -> None:
    b = S4D(WIDTH, d_state=64, init="legs").ssm.b
    assert torch.equal(b[0], b[-1])
    assert b[..., 1].abs().max() < 1e-6
    assert b[..., 0].max() == 2
    assert b[..., 0].min().item() == pytest.approx(0.5945, abs=1e-4)
    hippo = S4SSM(WIDTH, d_state=64).b
    torch.testing.assert_close(b, hippo.clamp(max=2))


@pytest.mark.parametrize("init", ["lin", "inv"])
def test_b_begins_as_one_elsewhere(init: str) -> None:
    for ssm in (S4D(WIDTH, init=init).ssm, DiagonalSSM(WIDTH, init=init)):
        assert torch.equal(ssm.b, torch.tensor([1.0, 0.0]).expand_as(ssm.b))


def test_filters_biases_and_scales_do_not_decay() -> None:
    filters, recurrent, dss = LongConv(WIDTH).ssm, BlockRecurrent(WIDTH), DSS(WIDTH).ssm
    undecayed = [filters.w_in, filters.w_hidden, filters.b_hidden, filters.w_out, filters.frequency]
    for layer, parameters in (
        (filters, undecayed),
        (recurrent, [recurrent.scales]),
        (dss, [dss.c]),
    ):
        for parameter in parameters:
            assert group_of(layer, parameter)["weight_decay"] == 0
            assert group_of(layer, parameter)["name"] == "no_decay"
    assert group_of(recurrent, recurrent.qq_proj.weight)["weight_decay"] == 0.1


# Far positions -----------------------------------------------------------------------------------

FAR = 27_000_000


def test_far_positions_rotate_by_float64_angles_of_the_float32_frequencies() -> None:
    x = torch.randn(1, 3, 1, 64)
    positions = torch.tensor([[5000, FAR, 2**36 + 1]])
    frequency = (10_000.0 ** (-2 * torch.arange(32.0) / 64)).double()
    angle = (positions[..., None] * frequency)[:, :, None]
    first, second = x.double().chunk(2, dim=-1)
    wanted = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    found = rotate(x, positions, dims=64).double()
    torch.testing.assert_close(found, torch.cat(wanted, dim=-1), rtol=0, atol=1e-5)


def test_near_positions_rotate_in_float32() -> None:
    x, positions = torch.randn(1, 4096, 1, 8), torch.arange(4096)[None]
    angle = positions[..., None].float() * 10_000.0 ** (-2 * torch.arange(4.0) / 8)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    first, second = x.chunk(2, dim=-1)
    wanted = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    with use_backend("torch"):
        assert torch.equal(rotate(x, positions, dims=8), wanted)


@pytest.mark.parametrize("start", [4090, 1_000_000, FAR])
@torch.no_grad()
def test_a_stream_with_rope_is_as_good_at_27_million_tokens_as_at_its_start(start: int) -> None:
    """Rotary scores depend on differences of positions alone."""
    layer = SlidingAttention(64, window=16, position="rope")
    x = torch.randn(1, 40, 64)
    state = layer.init_state(1)
    later = state._replace(length=state.length + start)
    _, state = layer.forward_chunk(x[:, :20], state)
    _, later = layer.forward_chunk(x[:, :20], later)
    # the later stream believes that its first window held zeros: after 20 tokens nobody sees them
    near, _ = layer.forward_chunk(x[:, 20:], state)
    far, _ = layer.forward_chunk(x[:, 20:], later)
    torch.testing.assert_close(far, near, rtol=0, atol=3e-5)


# Costs -------------------------------------------------------------------------------------------


def matrix_products(layer: AnyLayer, length: int) -> dict[str, int]:
    """Operations that PyTorch counts, by kind of product."""
    x = torch.randn(1, length, layer.d_model)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(x)
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("length", [1, 5, 64, 100])
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_the_kernel_of_s4_costs_the_products_that_pytorch_counts(
    length: int, n_outputs: int
) -> None:
    layer = S4SSM(4, d_state=6, n_outputs=n_outputs)
    counted = sum(matrix_products(layer, length).values()) / length
    transform = 4 * n_outputs * convolution_flops(length)
    assert layer.flops_per_token(length) == pytest.approx(counted + transform)


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_the_kernel_of_dss_softmax_costs_the_products_that_pytorch_counts(n_outputs: int) -> None:
    layer = DSS(4, kernel="softmax", d_state=6, filter_len=64, n_outputs=n_outputs).ssm
    with use_backend("torch"):
        counted = sum(matrix_products(layer, 16).values()) / 16
    transform = 4 * n_outputs * convolution_flops(16)
    assert layer.flops_per_token(16) == pytest.approx(counted + transform)


@pytest.mark.parametrize("length", [1, 16, 17, 128, 5000])
def test_the_scan_of_s5_costs_the_products_that_pytorch_counts(length: int) -> None:
    layer = S5SSM(4, d_state=6, n_outputs=3)
    counted = sum(matrix_products(layer, length).values()) / length
    assert layer.flops_per_token(length) == pytest.approx(counted)


@pytest.mark.parametrize("length", [1, 16, 128])
@pytest.mark.parametrize(
    "layer",
    [
        LinearAttention(WIDTH),
        LinearAttention(WIDTH, feature="identity", normalise=False),
        LinearAttention(WIDTH, feature="random", n_features=6),
        LinearAttention(WIDTH, feature="taylor"),
        GatedLinearAttention(WIDTH, expand_k=1.0),
        HGRN2(WIDTH),
        LightningAttention(WIDTH),
        MLSTM(WIDTH),
        Retention(WIDTH),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_linear_attention_costs_the_products_that_pytorch_counts(
    layer: AnyLayer, length: int
) -> None:
    with use_backend("torch"):
        counted = sum(matrix_products(layer, length).values()) / length
    assert layer.flops_per_token(length) == pytest.approx(counted)


@pytest.mark.parametrize("length", [1, 16, 128])
@pytest.mark.parametrize(
    ("kind", "chunk"),
    [
        (GatedDeltaNet, 32),
        (partial(GatedDeltaNet, gated=False), 32),
        (KimiDeltaAttention, 16),
        (RWKV7, 16),
    ],
)
def test_a_delta_rule_costs_the_products_that_pytorch_counts(
    kind: Any, chunk: int, length: int
) -> None:
    """PyTorch counts neither the solution of the system nor the short convolution."""
    layer = kind(WIDTH, n_heads=2)
    with use_backend("torch"):
        counted = sum(matrix_products(layer, length).values()) / length
    solution = min(length, chunk) * math.prod(layer.init_state(1).s.shape[1::2])
    convolutions = [m for m in layer.modules() if isinstance(m, ShortConv)]
    wanted = counted + solution + sum(m.flops_per_token(length) for m in convolutions)
    assert layer.flops_per_token(length) == pytest.approx(wanted)


def linear_products(layer: AnyLayer, length: int) -> int:
    found = matrix_products(layer, length)
    return sum(count for op, count in found.items() if op.split(".")[-1] in ("mm", "addmm"))


def attentions(kind: type[AnyLayer], **options: Any) -> Stack:
    return Stack(kind(WIDTH, **options), FeedForward(WIDTH), kind(WIDTH, **options))


CORES = [(Attention, {}), (SlidingAttention, {"window": 100})]


@pytest.mark.parametrize(("kind", "options"), CORES)
@pytest.mark.parametrize("length", [4, 24])
def test_feedback_costs_its_projections_and_the_memories_that_it_sees(
    kind: type[AnyLayer], options: dict[str, Any], length: int
) -> None:
    layer = Feedback(attentions(kind, **options), window=6)
    seen = sum(min(t, 6) for t in range(length)) / length
    mixing = 2 * WIDTH * 3
    wanted = linear_products(layer, length) / length + 2 * 4 * WIDTH * seen + mixing
    assert layer.flops_per_token(length) == pytest.approx(wanted)


def test_shared_memories_are_projected_once() -> None:
    apart, shared = (
        Feedback(attentions(SlidingAttention, window=9), window=6, shared=shared)
        for shared in (False, True)
    )
    for layer in (apart, shared):
        linear = linear_products(layer, 12) / 12
        rest = layer.flops_per_token(12) - linear
        assert rest == pytest.approx(apart.flops_per_token(12) - linear_products(apart, 12) / 12)
    assert apart.flops_per_token(12) - shared.flops_per_token(12) == 2 * 2 * WIDTH**2


@pytest.mark.parametrize(("kind", "options"), CORES)
@pytest.mark.parametrize(("passes", "steps"), [(1, 4), (2, 3), (3, 5), (2, None)])
def test_cached_staircase_costs_its_projections_and_the_chunks_that_it_sees(
    kind: type[AnyLayer], options: dict[str, Any], passes: int, steps: int | None
) -> None:
    chunk_len, length = 3, 24
    layer = CachedStaircase(
        attentions(kind, **options), passes=passes, chunk_len=chunk_len, steps=steps
    )
    seen = 0.0
    for n in range(1, passes + 1):
        for t in range(length):
            chunk, place = divmod(t, chunk_len)
            most = chunk if steps is None else min(chunk, steps - n)
            seen += most * chunk_len + place + 1
    wanted = linear_products(layer, length) / length + 2 * 4 * WIDTH * seen / length
    assert layer.flops_per_token(length) == pytest.approx(wanted)


@pytest.mark.parametrize("length", [1, 4, 7, 30])
@pytest.mark.parametrize("options", [{}, {"includes_self": False}, {"blocks": True}])
def test_sliding_attention_costs_its_projections_and_the_positions_that_it_sees(
    options: dict[str, Any], length: int
) -> None:
    layer = SlidingAttention(WIDTH, window=4, position="none", **options)
    seen = 0
    for t in range(length):
        earlier = t % 4 + (4 if t >= 4 else 0)
        seen += (earlier if layer.blocks else min(t, layer.span)) + layer.includes_self
    wanted = linear_products(layer, length) / length + 4 * WIDTH * seen / length
    assert layer.flops_per_token(length) == pytest.approx(wanted)


def test_the_average_number_of_visible_items_is_that_of_a_count() -> None:
    for window in (0, 1, 4, 9, 20, math.inf):
        wanted = sum(min(t, window) for t in range(9)) / 9
        assert mean_visible(9, window) == pytest.approx(wanted)
