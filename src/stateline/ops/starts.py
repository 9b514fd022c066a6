"""Documents in the rows of a signal: how recurrences reset their state at each of them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Starts = Bool[Tensor, "batch length"]

FORGET = -torch.inf
"""Logarithmic decay after which the state is zero."""


def at_starts(
    x: Float[Tensor, "batch length *shape"], starts: Starts | None, value: float
) -> Float[Tensor, "batch length *shape"]:
    """A signal with another value where documents begin.

    Example:
        >>> at_starts(torch.ones(1, 2), torch.tensor([[False, True]]), FORGET).flatten()
        tensor([1., -inf])
    """
    if starts is None:
        return x
    return x.masked_fill(starts.view(*starts.shape, *[1] * (x.ndim - 2)), value)
