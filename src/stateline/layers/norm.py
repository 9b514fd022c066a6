"""Normalisations: they map each position separately, so they are not sequence layers."""

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

Each takes the width and an epsilon that is added to the variance.
"""


def unit_length(x: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
    """Scale vectors to length one, as for queries and keys.

    The square root contains an epsilon of 1e-6, as in fla and Qwen3-Next, so zero stays zero.

    Example:
        >>> unit_length(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)
