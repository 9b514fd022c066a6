"""What tests of layers against the recurrences of their papers share."""

from typing import Any

import torch
from torch import Tensor

WIDTH, HEADS, LENGTH = 8, 2, 21
SAME = {"rtol": 0, "atol": 1e-10}


def made(layer: Any) -> tuple[Any, Tensor]:
    """The layer with weights of moderate size, and an input; float64."""
    torch.manual_seed(0)
    layer = layer.double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight) / 2)
    return layer, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1))


def normed(y: Tensor, norm: Any) -> Tensor:
    return y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
