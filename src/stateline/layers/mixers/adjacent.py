"""Linear maps to and from signals whose times are adjacent in memory, as GPU kernels take them.

The change of the layout is part of the product, which saves a copy of every signal.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.plain import is_plain_with_bias


def to_adjacent(
    linear: nn.Module, x: Float[Tensor, "batch length d_in"]
) -> Float[Tensor, "batch length d_out"]:
    """The map, on a GPU as a view of (batch, d_out, length)."""
    if _on_gpu(x) and is_plain_with_bias(linear):
        weight = linear.weight.expand(len(x), -1, -1)
        return torch.baddbmm(linear.bias[:, None], weight, x.mT).mT
    return linear(x)


def from_adjacent(
    linear: nn.Module, x: Float[Tensor, "batch length d_in"]
) -> Float[Tensor, "batch length d_out"]:
    """The map of such a view, with adjacent channels."""
    if _on_gpu(x) and is_plain_with_bias(linear):
        return torch.baddbmm(linear.bias, x, linear.weight.mT.expand(len(x), -1, -1))
    return linear(x)


def _on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU, where the layout matters."""
    return x.is_cuda
