"""Normalisations: they map each position separately, so they are not sequence layers."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stateline.layers.decoder import prepared
from stateline.ops import rms_norm


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation: see :func:`stateline.ops.rms_norm`."""

    weight: nn.Parameter
    eps: float
    decodes = False

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Normalise the last axis."""
        if self.decodes:
            return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class OffsetRMSNorm(nn.Module):
    r"""Root-mean-square normalisation whose weight is stored as an offset from one.

    .. math:: y = (1 + w) \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    It is computed in float32 at least, so that small offsets count in half precision, too.

    References:
        Gemma Team, "Gemma", 2024; Qwen3-Next calls it zero-centred.
    """

    decodes = False

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Normalise the last axis."""
        scale = self.scale()
        if self.decodes:
            return F.rms_norm(x.to(scale.dtype), scale.shape, scale, self.eps).to(x.dtype)
        return rms_norm(x.to(scale.dtype), scale, self.eps).to(x.dtype)

    @prepared
    def scale(self) -> Float[Tensor, " d_model"]:
        """The weight, in float32 at least."""
        return 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


class BatchNorm(nn.BatchNorm1d):
    r"""Batch normalisation of each channel, over all rows and positions.

    .. math:: y = w \odot (x - \mathrm{E}[x]) / \sqrt{\mathrm{Var}[x] + \epsilon} + b

    In training, mean and variance are those of the batch, padding included, so an output depends on
    later positions; models of whole rows alone have it. Else they are running means.

    References:
        Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Normalise the last axis's channels."""
        return super().forward(x.mT).mT


NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, eps=1e-5: nn.LayerNorm(d_model, eps=eps),
    "rms": lambda d_model, eps=1e-5: RMSNorm(d_model, eps=eps),
    "rms_offset": OffsetRMSNorm,
    "batch": BatchNorm,
    "none": lambda _d_model, _eps=1e-5: nn.Identity(),
}
"""Layer normalisation (with bias), root-mean-square normalisation (without), the same with a weight
that is stored as an offset from one, batch normalisation, or none.

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


def scaled_queries(
    q: Float[Tensor, "*batch head d_head"], scale: Float[Tensor, " head"] | None
) -> Float[Tensor, "*batch head d_head"]:
    """Queries of unit length times scale and sqrt(d), by which attention divides."""
    return q if scale is None else unit_length(q) * (scale * q.shape[-1] ** 0.5)[:, None]
