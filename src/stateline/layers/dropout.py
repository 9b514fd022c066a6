"""Dropout that costs nothing where it is off."""

import torch.nn.functional as F
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.decoder import prepared


class Dropout(nn.Dropout):
    r"""In training, :math:`y = m \odot x / (1 - p)` with a random mask m; P(m = 0) = p.

    In evaluation, and with p = 0, the input itself is returned. Masks come from PyTorch's global
    generator, which training seeds before every update.

    Args:
        p: Probability that an entry is dropped, from 0 to below 1.

    Raises:
        InputError: If the probability is out of range.

    References:
        Srivastava et al., "Dropout", Journal of Machine Learning Research, 2014.
    """

    def __init__(self, p: float) -> None:
        if not 0 <= p < 1:
            raise InputError(f"dropout must be from 0 to below 1, got {p}")
        super().__init__(p)

    @property
    @prepared
    def rate(self) -> float:
        """Probability that an entry is dropped in the present mode."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The input with some entries dropped."""
        return F.dropout(x, self.rate) if self.rate else x
