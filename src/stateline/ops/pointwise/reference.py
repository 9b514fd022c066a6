"""The definitions of the linear map, the feed-forward, SwiGLU, the norm and the rotation."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stateline.ops.pointwise import FeedForwardWeights


def feed_forward(x: Tensor, weights: FeedForwardWeights) -> Tensor:
    """Evaluate the formula."""
    w_in, b_in, w_out, b_out = weights
    z = x @ w_in.T + b_in
    gelu = 0.5 * z * (1 + (math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)).tanh())
    return gelu @ w_out.T + b_out


def linear_stepper(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Evaluate the formula."""
    return lambda x: x @ weight.T if bias is None else x @ weight.T + bias


def swiglu(h: Tensor) -> Tensor:
    """Evaluate the formula."""
    gate, up = h.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Evaluate the formula."""
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of entries is a complex number; multiply it by cos + i sin."""
    pairs = cos.shape[-1]
    wide = x.to(cos.dtype)
    numbers = torch.complex(wide[..., :pairs], wide[..., pairs : 2 * pairs])
    turned = numbers * torch.complex(cos, sin)[:, :, None]
    rotated = torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * pairs :]], dim=-1)
