"""Documents in the rows of a signal: what kernels need to begin anew at each of them."""

from typing import overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Starts = Bool[Tensor, "batch length"]


@overload
def reset(log_decay: Tensor, starts: Tensor | None, v: Tensor) -> Tensor: ...
@overload
def reset(log_decay: Tensor | None, starts: Tensor | None, v: Tensor) -> Tensor | None: ...
def reset(
    log_decay: Float[Tensor, "batch length head *entry"] | None,
    starts: Starts | None,
    v: Float[Tensor, "batch length head d_value"],
) -> Tensor | None:
    """Logarithmic decays that are minus infinity where documents begin: the state becomes zero.

    Example:
        >>> v = torch.ones(1, 2, 1, 1)
        >>> reset(None, torch.tensor([[False, True]]), v).flatten()
        tensor([0., -inf])
    """
    if starts is None:
        return log_decay
    if log_decay is None:
        log_decay = v.new_zeros(v.shape[:3])
    return log_decay.masked_fill(beside(starts, log_decay), -torch.inf)


def beside(starts: Starts, x: Tensor) -> Tensor:
    """The starts with as many axes as x, of which they have the first two."""
    return starts.view(*starts.shape, *[1] * (x.ndim - 2))
