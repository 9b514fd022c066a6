"""The definition of the taps of a shift state space model."""

import torch
from torch import Tensor


def shift_taps(b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Sum the products tap by tap."""
    size = b.shape[1]
    taps = [(b[:, : size - l] * c[:, l:]).sum(dim=1) for l in range(size)]  # noqa: E741
    return torch.stack([taps[0] + skip, *taps[1:]], dim=1)
