"""Rotation of halves, on any device."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the rotated entries against the second."""
    pairs, cos, sin = cos.shape[-1], cos[:, :, None], sin[:, :, None]  # (rows, length, 1, pair)
    first, second = x[..., :pairs].to(cos.dtype), x[..., pairs : 2 * pairs].to(cos.dtype)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], dim=-1)
