"""Claims of the papers that are exact: special cases, and operations counted.

That ``flops_per_token`` is what PyTorch counts is tested with the layers.
"""

import torch
from torch import nn
from torch.testing import assert_close

from stateline.layers import H3, Attention, CachedStaircase, Ladder, Residual, Staircase

CHUNK, LONG = 4, 4096


def core() -> Residual:
    return Residual(Attention(8, n_heads=2), nn.LayerNorm(8))


def test_a_ladder_of_one_layer_is_a_universal_transformer() -> None:
    """The same layer, N times; in the orders ABAB and AABB alike."""
    torch.manual_seed(0)
    layer, x = core().double(), torch.randn(2, 9, 8, dtype=torch.float64)
    wanted = layer(layer(layer(layer(x))))
    assert_close(Ladder(layer, passes=4)(x), wanted)
    assert_close(Ladder(Ladder(layer, passes=2), passes=2)(x), wanted)


def test_a_cache_makes_the_attention_of_a_staircase_linear_in_its_steps() -> None:
    """A step attends to N chunks in each of N passes: N^2 C; with M passes and a cache: N M C."""

    def plain(steps: int) -> float:
        return Staircase(core(), passes=steps, chunk_len=CHUNK).flops_per_token(LONG)

    def cached(steps: int) -> float:
        layer = CachedStaircase(core(), passes=1, chunk_len=CHUNK, steps=steps)
        return layer.flops_per_token(LONG)

    def curvature(cost: object) -> float:
        assert callable(cost)
        return float(cost(12) - 2 * cost(8) + cost(4)) / cost(4)

    assert curvature(plain) > 0.1
    assert abs(curvature(cached)) < 0.01


def test_h3_costs_a_logarithm_per_token_where_attention_costs_the_length() -> None:
    h3, attention = H3(8), Attention(8, n_heads=1)
    assert h3.flops_per_token(16 * LONG) < 1.5 * h3.flops_per_token(LONG)
    assert attention.flops_per_token(16 * LONG) > 15 * attention.flops_per_token(LONG)
