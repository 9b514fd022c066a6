"""AFT-conv is its formula, and its exponentials overflow nowhere."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from stateline.errors import InputError
from stateline.layers import AFT


def made(scale: float = 1.0) -> AFT:
    torch.manual_seed(0)
    layer = AFT(6, n_heads=2, window=3)
    with torch.no_grad():
        layer.distance.normal_()
        layer.qkv.weight[6:12] *= scale  # of the keys
    return layer


def formula(layer: AFT, x: Tensor) -> Tensor:
    """Every weight by itself."""
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    w = torch.zeros(x.shape[1], 6, dtype=x.dtype)
    w[: layer.window] = layer.distance.T.repeat_interleave(3, dim=1)
    means = []
    for t in range(x.shape[1]):
        weights = torch.softmax(k[:, : t + 1] + w[: t + 1].flip(0), dim=1)
        means.append((weights * v[:, : t + 1]).sum(dim=1))
    return layer.out_proj(q.sigmoid() * torch.stack(means, dim=1))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_it_is_the_formula(scale: float) -> None:
    layer = made(scale).double()
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    assert_close(layer(x), formula(layer, x))


def test_with_one_distance_of_weight_zero_it_is_a_softmax_over_time() -> None:
    """AFT-simple."""
    layer, x = AFT(4, n_heads=1, window=1).double(), torch.randn(1, 9, 4, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, dim=-1)
    mean = (k.exp() * v).cumsum(dim=1) / k.exp().cumsum(dim=1)
    assert_close(layer(x), layer.out_proj(q.sigmoid() * mean))


@pytest.mark.parametrize("length", [1, 8, 100])
def test_it_costs_its_maps_and_what_it_joins(length: int) -> None:
    class Pointwise(TorchDispatchMode):
        """Counts the results of the functions that join sums."""

        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            joins = ("maximum", "sub", "exp", "mul", "add")
            self.count += result.numel() if func.overloadpacket.__name__ in joins else 0
            return result

    layer = made()
    with torch.no_grad(), Pointwise() as found:
        layer(torch.randn(1, length, layer.d_model).to(layer.distance.dtype))
    maps, gate = 2 * 4 * layer.d_model**2, layer.d_model
    wanted = maps - gate + found.count / length
    assert layer.flops_per_token(length) == pytest.approx(wanted)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="window"):
        AFT(4, window=0)
    with pytest.raises(InputError, match="n_heads"):
        AFT(4, n_heads=3)
