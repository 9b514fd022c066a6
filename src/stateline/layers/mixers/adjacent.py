"""Linear maps to and from signals whose times are adjacent in memory, as GPU kernels take them.

The change of the layout is part of the product, which saves a copy of every signal.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.plain import is_plain


def to_adjacent(
    linear: nn.Linear, x: Float[Tensor, "batch length d_in"]
) -> Float[Tensor, "batch length d_out"]:
    """The map, on a GPU as a view of (batch, d_out, length)."""
    if not _on_gpu(linear, x):
        return linear(x)
    weight = linear.weight.expand(len(x), -1, -1)
    return torch.baddbmm(linear.bias[:, None], weight, x.mT).mT


def from_adjacent(
    linear: nn.Linear, x: Float[Tensor, "batch length d_in"]
) -> Float[Tensor, "batch length d_out"]:
    """The map of such a view, with adjacent channels."""
    if not _on_gpu(linear, x):
        return linear(x)
    return torch.baddbmm(linear.bias, x, linear.weight.mT.expand(len(x), -1, -1))


def _on_gpu(linear: nn.Linear, x: Tensor) -> bool:
    """Whether the layout counts, and the map need not be called."""
    return x.is_cuda and is_plain(linear)
