"""Claims of the papers that are exact: special cases, and operations and memory counted.

That ``flops_per_token`` is what PyTorch counts is tested with the layers.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from stateline.layers import (
    H3,
    AnyLayer,
    Attention,
    BlockRecurrent,
    BlockState,
    CachedStaircase,
    DiagonalSSM,
    Feedback,
    Ladder,
    LinearAttention,
    Residual,
    SequenceLayer,
    SlidingAttention,
    Stack,
    Staircase,
)
from stateline.ops import fft_conv, use_backend

CHUNK, LONG = 4, 4096
F64 = torch.float64


def core() -> Residual:
    return Residual(Attention(8, n_heads=2), nn.LayerNorm(8))


def test_a_ladder_of_one_layer_is_a_universal_transformer() -> None:
    """The same layer, N times; in the orders ABAB and AABB alike."""
    torch.manual_seed(0)
    layer, x = core().double(), torch.randn(2, 9, 8, dtype=torch.float64)
    wanted = layer(layer(layer(layer(x))))
    assert_close(Ladder(layer, passes=4)(x), wanted)
    assert_close(Ladder(Ladder(layer, passes=2), passes=2)(x), wanted)


def test_a_feedback_transformer_is_a_cached_staircase_of_one_token_and_one_pass() -> None:
    """If its memory is the last layer alone; neither attends to the own position."""
    torch.manual_seed(0)
    layers = [
        Residual(SlidingAttention(8, window=9, n_heads=2, includes_self=False), nn.LayerNorm(8))
        for _ in range(2)
    ]
    layer = Feedback(Stack(*layers), window=3).double()
    with torch.no_grad():
        layer.mixture[:-1] = -1e9
    x = torch.randn(2, 10, 8, dtype=F64)
    assert_close(layer(x), CachedStaircase(layer.core, passes=1, chunk_len=1, steps=4)(x))


def test_a_cache_makes_the_attention_of_a_staircase_linear_in_its_steps() -> None:
    """A step attends to N chunks in each of N passes: N^2 C; with M passes and a cache: N M C."""

    def plain(steps: int) -> float:
        return Staircase(core(), passes=steps, chunk_len=CHUNK).flops_per_token(LONG)

    def cached(steps: int, passes: int = 1, chunk_len: int = CHUNK) -> float:
        layer = CachedStaircase(core(), passes=passes, chunk_len=chunk_len, steps=steps)
        return layer.flops_per_token(LONG)

    def curvature(cost: object) -> float:
        assert callable(cost)
        return float(cost(12) - 2 * cost(8) + cost(4)) / cost(4)

    assert curvature(plain) > 0.1
    assert abs(curvature(cached)) < 0.01

    def per_step(passes: int, chunk_len: int) -> float:
        return cached(12, passes, chunk_len) - cached(4, passes, chunk_len)

    # A token is one of the C of its chunk, so its share of N M C^2 is N M C.
    assert per_step(4, CHUNK) == pytest.approx(4 * per_step(1, CHUNK), rel=0.01)
    assert per_step(1, 2 * CHUNK) == pytest.approx(2 * per_step(1, CHUNK), rel=0.01)


def test_a_staircase_costs_tokens_times_passes() -> None:
    """If its core looks back at most a chunk: N passes of a token, at any length."""

    def cost(passes: int, length: int = LONG) -> float:
        layer = Residual(SlidingAttention(8, window=CHUNK, n_heads=2), nn.LayerNorm(8))
        return Staircase(layer, passes=passes, chunk_len=CHUNK).flops_per_token(length)

    assert cost(4, 8 * LONG) == pytest.approx(cost(4), rel=0.01)
    assert cost(8) == pytest.approx(2 * cost(4), rel=0.01)


def test_a_staircase_with_chunks_of_one_token_and_two_passes_is_a_recurrent_network() -> None:
    """h_t = f(h_{t-1}, x_t), of which the second pass reads the output."""
    torch.manual_seed(0)
    layer, x = core().double(), torch.randn(2, 9, 8, dtype=F64)
    h, ys = layer(x[:, :1]), []
    for t in range(1, 9):
        ys.append(layer(h))
        h = layer(torch.cat([h, x[:, t : t + 1]], dim=1))[:, 1:]
    wanted = torch.cat([*ys, layer(h)], dim=1)
    assert_close(Staircase(layer, passes=2, chunk_len=1)(x), wanted)


def test_h3_costs_a_logarithm_per_token_where_attention_costs_the_length() -> None:
    h3, attention = H3(8), Attention(8, n_heads=1)
    assert h3.flops_per_token(16 * LONG) < 1.5 * h3.flops_per_token(LONG)
    assert attention.flops_per_token(16 * LONG) > 15 * attention.flops_per_token(LONG)


def test_a_ladder_has_the_operations_of_twice_the_layers_and_half_their_weights() -> None:
    a, b, c, d = (core() for _ in range(4))
    ladder, deep = Ladder(Stack(a, b), passes=2), Stack(a, b, c, d)
    assert ladder.flops_per_token(LONG) == deep.flops_per_token(LONG)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ladder, deep)]
    assert 2 * sizes[0] == sizes[1]


def test_the_same_weights_compute_another_function_in_the_order_aabb() -> None:
    torch.manual_seed(0)
    a, b, x = core(), core(), torch.randn(2, 9, 8)
    abab = Ladder(Stack(a, b), passes=2)
    aabb = Stack(Ladder(a, passes=2), Ladder(b, passes=2))
    assert_close(abab(x), b(a(b(a(x)))))
    assert_close(aabb(x), b(b(a(a(x)))))
    assert (abab(x) - aabb(x)).abs().max() > 0.1


class Depth(SequenceLayer[Tensor]):
    """A core that counts: one more computation than the deepest input so far."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Tensor:
        return torch.full((batch_size, self.d_model), -math.inf)

    def forward_chunk(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        deepest = torch.cat([state[:, None], x], dim=1).cummax(dim=1).values[:, 1:]
        return deepest + 1, deepest[:, -1]


def test_in_a_staircase_depth_grows_with_the_distance() -> None:
    """By one computation for each chunk between an input and an output."""
    x = torch.full((1, 8 * CHUNK, 1), -math.inf)
    x[:, 0] = 0
    depth = Staircase(Depth(1), passes=3, chunk_len=CHUNK)(x).flatten()
    assert depth.tolist() == [3 + t // CHUNK for t in range(8 * CHUNK)]
    assert Ladder(Depth(1), passes=3)(x).unique().tolist() == [3]


def kept_by_h3(length: int) -> int:
    """Bytes that an H3 layer keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        H3(8)(torch.randn(1, length, 8)).sum()
    return sum(sizes.values())


def test_h3_keeps_memory_linear_in_the_length() -> None:
    """By equal amounts from 512 to 1,024 to 1,536 tokens."""
    first, second, third = (kept_by_h3(length) for length in (512, 1024, 1536))
    assert third - second == second - first > 512 * 8 * 4


def test_linear_attention_is_a_time_varying_system() -> None:
    """x_t = x_{t-1} + phi(k_t) v_t^T and y_t = phi(q_t)^T x_t: A and B are constant, C varies."""
    torch.manual_seed(0)
    layer = LinearAttention(6, n_heads=1, normalise=False).double()
    u, x, ys = torch.randn(5, 6, dtype=F64), torch.zeros(6, 6, dtype=F64), []
    for q, k, v in zip(*layer.qkv(u).chunk(3, dim=-1), strict=True):
        x = x + torch.outer(nn.functional.elu(k) + 1, v)
        ys.append((nn.functional.elu(q) + 1) @ x)
    assert_close(layer(u[None])[0], layer.out_proj(torch.stack(ys)))


def test_h3_that_sums_and_shifts_nothing_is_linear_attention() -> None:
    """Shift SSM and diagonal SSM stand in the places of phi and of the sum."""
    torch.manual_seed(0)
    layer, attention = (
        H3(8, d_head=4, d_state=2),
        LinearAttention(8, n_heads=2, feature="identity", normalise=False),
    )
    with torch.no_grad():
        for name, parameter in [
            *layer.shift.named_parameters(),
            *layer.diagonal.named_parameters(),
        ]:
            parameter.fill_(-1e4 if name == "log_decay" else 0.0)  # a decay that rounds to zero
        layer.shift.b[:, 0] = layer.shift.c[:, 0] = 1
        layer.diagonal.b[..., 0], layer.diagonal.c[..., 0] = 1, 0.5
        layer.qkv.bias.zero_()
        layer.out_proj.bias.zero_()
        layer.qkv.weight.copy_(attention.qkv.weight)
        layer.out_proj.weight.copy_(attention.out_proj.weight)
    x = torch.randn(2, 9, 8)
    assert_close(layer(x), attention(x))


def test_gradients_of_a_long_convolution_are_its_correlations() -> None:
    """du = iFFT(conj(FFT(f)) FFT(dy)) + D dy, df likewise with u, dD = sum of dy u."""
    torch.manual_seed(0)
    n = 7
    u, f, d, dy = (torch.randn(k, dtype=F64, requires_grad=True) for k in (n, n, 1, n))
    y = fft_conv(u[None, :, None], f[None])[0, :, 0] + d * u
    found = torch.autograd.grad(y, (u, f, d), dy)
    of_u, of_f, of_dy = (torch.fft.rfft(x, 2 * n) for x in (u, f, dy))
    du, df = (torch.fft.irfft(own.conj() * of_dy, 2 * n)[:n] for own in (of_f, of_u))
    for one, wanted in zip(found, (du + d * dy, df, (dy * u).sum()[None]), strict=True):
        assert_close(one, wanted)


def test_the_state_after_a_chunk_is_the_paper_s_matrix_times_its_inputs() -> None:
    """M_ux = [A^(N-1) B, ..., A B, B]."""
    torch.manual_seed(0)
    layer, u = DiagonalSSM(1, d_state=6).double(), torch.randn(5, dtype=F64)
    weights = layer.weights()
    a, b = torch.view_as_complex(weights.log_a[0]).exp(), torch.view_as_complex(weights.b[0])
    m = torch.stack([a**power * b for power in range(4, -1, -1)], dim=1)
    _, state = layer.forward_chunk(u[None, :, None], layer.init_state(1))
    assert_close(torch.view_as_complex(state.h[0, 0]), m @ u.to(m.dtype))


def test_a_state_adds_what_it_becomes_to_the_convolution() -> None:
    """y_t = C A^(t+1) x_0 + sum of C A^i B u_{t-i} + D u_t; half of the modes are conjugates."""
    torch.manual_seed(0)
    layer, u = DiagonalSSM(1, d_state=6).double(), torch.randn(1, 5, 1, dtype=F64)
    weights = layer.weights()
    a, c = torch.view_as_complex(weights.log_a[0]).exp(), torch.view_as_complex(weights.c[0])
    zero = layer.init_state(1)
    x0 = torch.randn_like(zero.h)
    start = torch.view_as_complex(x0[0, 0])
    free = torch.stack([(c * a**power * start).sum() for power in range(1, 6)])
    y, _ = layer.forward_chunk(u, zero._replace(h=x0))
    assert_close((y - layer(u)).flatten(), 2 * free.real)


def block_fft(x: Tensor, radix: int) -> tuple[Tensor, int]:
    """The Fourier transform by products with radix x radix matrices, and how many it takes."""
    if x.shape[-1] == 1:
        return x, 0
    n, rest = x.shape[-1], x.shape[-1] // radix
    one = torch.arange(radix, dtype=F64)
    fourier = torch.exp(-2j * math.pi / radix * torch.outer(one, one))
    twiddles = torch.exp(-2j * math.pi / n * torch.outer(one, torch.arange(rest, dtype=F64)))
    blocks = twiddles * (fourier @ x.unflatten(-1, (radix, rest)))
    inner, products = block_fft(blocks, radix)
    return inner.mT.flatten(-2), x.numel() * radix + products


@pytest.mark.parametrize(("radix", "power"), [(2, 6), (4, 3), (16, 2)])
def test_the_block_fft_takes_n_r_log_n_over_log_r_products(radix: int, power: int) -> None:
    x = torch.randn(radix**power, dtype=torch.complex128)
    found, products = block_fft(x, radix)
    assert_close(found, torch.fft.fft(x))
    assert products == pytest.approx(len(x) * radix * math.log(len(x)) / math.log(radix))


def test_a_softmax_is_as_sharp_as_its_margin() -> None:
    """Lemma C.3: z_i >= a and the others <= b give s_i >= 1 / (1 + K e^(b-a)), s_j <= e^(b-a)."""
    z = torch.rand(100, 9, dtype=F64, generator=torch.Generator().manual_seed(0)) * 4
    z[:, 0] += 5
    a, b = z[:, 0], z[:, 1:].amax(dim=1)
    s, gap = z.softmax(dim=1), torch.exp(b - a)
    assert (s[:, 0] >= 1 / (1 + 9 * gap)).all()
    assert (s[:, 1:].amax(dim=1) <= gap).all()


def steps_of_gradients(layer: AnyLayer, length: int) -> int:
    """Operations on the longest path from the output back to the input, one after the other."""
    with use_backend("torch"):
        end = layer(torch.randn(1, length, 8, requires_grad=True)).sum().grad_fn
    depth: dict[object, int] = {}
    waiting = [end]
    while waiting:
        below = [node for node, _ in waiting[-1].next_functions if node is not None]
        if missing := [node for node in below if node not in depth]:
            waiting += missing
        else:
            depth[waiting.pop()] = 1 + max((depth[node] for node in below), default=0)
    return depth[end]


def steps_per_block(layer: AnyLayer) -> float:
    """Further operations, one after the other, per further block."""
    few, many = 16, 128
    steps = steps_of_gradients(layer, many * CHUNK) - steps_of_gradients(layer, few * CHUNK)
    return steps / (many - few)


@pytest.mark.parametrize("ssm", ["dss", "long_conv", "s4", "s4d", "s5"])
@pytest.mark.parametrize("variant", ["sh", "mh", "mf"])
def test_no_block_of_a_block_state_layer_waits_for_another(variant: str, ssm: str) -> None:
    """A block that waits for the one before it adds an operation or more, as in Block-Recurrent."""
    layer = BlockState(8, n_heads=2, window=CHUNK, variant=variant, n_states=4, ssm=ssm)
    assert steps_per_block(layer) < 0.5


def test_every_block_of_a_block_recurrent_layer_waits_for_the_one_before() -> None:
    assert steps_per_block(BlockRecurrent(8, n_heads=2, window=CHUNK, n_states=4)) > 1
