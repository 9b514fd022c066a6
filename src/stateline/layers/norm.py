"""Normalisations: maps of each position by itself, so not sequence layers."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, eps=1e-5: nn.LayerNorm(d_model, eps=eps),
    "rms": lambda d_model, eps=1e-5: nn.RMSNorm(d_model, eps=eps),
    "none": lambda _d_model, _eps=1e-5: nn.Identity(),
}
"""Layer normalisation (with bias), root-mean-square normalisation (without), or none.

Each takes the width, and what is added to the variance before its root is taken.
"""


def unit_length(x: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
    """Vectors of length one (nearly: zero stays zero), as queries and keys may be.

    Example:
        >>> unit_length(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)
