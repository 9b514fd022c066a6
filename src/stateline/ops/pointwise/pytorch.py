"""Functions of single positions by PyTorch's own, on any device."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.linear import linear
from stateline.ops.pointwise import FeedForwardWeights


def feed_forward(x: Tensor, weights: FeedForwardWeights) -> Tensor:
    """Two linear maps and GELU."""
    w_in, b_in, w_out, b_out = weights
    return linear(_gelu(linear(x, w_in, b_in)), w_out, b_out)


def _gelu(h: Tensor) -> Tensor:
    """GELU; compiled on a CPU by the logistic function, whose code takes half the time of tanh."""
    if not (torch.compiler.is_compiling() and h.is_cpu):
        return F.gelu(h, approximate="tanh")
    z = h.to(torch.promote_types(h.dtype, torch.float32))
    slope = 2 * math.sqrt(2 / math.pi)
    return (z * torch.sigmoid(slope * (z + 0.044715 * z * z * z))).to(h.dtype)


def linear_stepper(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The map itself: there is nothing to prepare."""
    return partial(linear, weight=weight, bias=bias)


def swiglu(h: Tensor) -> Tensor:
    """Two passes over memory."""
    gate, up = h.chunk(2, dim=-1)
    return up * F.silu(gate)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's function, which has a kernel of its own on a GPU."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the rotated entries against the second."""
    pairs, cos, sin = cos.shape[-1], cos[:, :, None], sin[:, :, None]  # (rows, length, 1, pair)
    first, second = x[..., :pairs].to(cos.dtype), x[..., pairs : 2 * pairs].to(cos.dtype)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], dim=-1)
