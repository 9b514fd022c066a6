"""Linear attention with features that approach the exponential."""

import math

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LinearAttention


def test_random_features_approach_softmax_attention_as_their_number_grows() -> None:
    torch.manual_seed(0)
    plain = LinearAttention(8, n_heads=2)
    x = torch.randn(4, 12, 8)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in plain.qkv(x).chunk(3, -1))
    scores = (q @ k.mT / math.sqrt(4)).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    exact: Tensor = plain.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    def error(n_features: int) -> float:
        layer = LinearAttention(8, n_heads=2, feature="random", n_features=n_features)
        layer.load_state_dict(plain.state_dict(), strict=False)
        return ((layer(x) - exact).norm() / exact.norm()).item()

    few, many = error(16), error(65536)
    assert many < few / 8
    assert many < 0.02


def test_the_directions_of_random_features_are_normal_and_orthogonal_in_groups() -> None:
    torch.manual_seed(0)
    drawn = LinearAttention(6, n_heads=1, feature="random", n_features=6 * 5000).projection
    groups = drawn.unflatten(0, (-1, 6))
    products = groups @ groups.mT
    assert (products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4
    assert drawn.mean(0).abs().max() < 0.03
    torch.testing.assert_close(drawn.mT.cov(), torch.eye(6), atol=0.05, rtol=0)


def test_the_features_are_saved_with_the_weights_and_their_number_grows_with_the_heads() -> None:
    layer = LinearAttention(32, n_heads=2, feature="random")
    assert layer.state_dict()["projection"].shape == (int(16 * math.log(16)), 16)
    assert LinearAttention(4, n_heads=4, feature="random").n_features == 1


@pytest.mark.parametrize("normalise", [True, False])
def test_taylor_features_weigh_by_the_exponential_to_the_second_order(normalise: bool) -> None:
    torch.manual_seed(0)
    layer = LinearAttention(8, n_heads=2, feature="taylor", normalise=normalise).double()
    x = torch.randn(4, 12, 8, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    u = q @ k.mT / math.sqrt(4)
    weights = (1 + u + u.square() / 2).tril()
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    wanted = layer.out_proj((weights @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), wanted)
    assert layer.init_state(3).s.shape == (3, 2, 1 + 4 + 16, 4 + normalise)


def test_a_number_of_features_is_for_random_ones() -> None:
    with pytest.raises(InputError, match="n_features is for feature='random' alone, got feature="):
        LinearAttention(4, feature="elu", n_features=4)
