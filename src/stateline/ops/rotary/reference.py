"""The definition: each pair of entries is a complex number that is multiplied."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply by cos + i sin."""
    pairs = cos.shape[-1]
    wide = x.to(cos.dtype)
    numbers = torch.complex(wide[..., :pairs], wide[..., pairs : 2 * pairs])
    turned = numbers * torch.complex(cos, sin)[:, :, None]
    rotated = torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * pairs :]], dim=-1)
