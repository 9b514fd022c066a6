"""Shared by the causal convolutions: inputs before a signal, and how they are updated."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def whole_filters(u: Tensor, kernel: Tensor) -> str:
    """Why the kernels do not fit the channels, or an empty string."""
    channels, outputs = u.shape[-1], len(kernel)
    if not outputs or not channels or outputs % channels:
        return (
            "the number of kernels must be a multiple of the number of channels: "
            f"got {outputs} kernels for {channels} channels"
        )
    return "" if kernel.shape[1] or not u.shape[-2] else "the kernels need at least one tap"


def convolve_after(
    past: Tensor | None, u: Tensor, kernel: Tensor, convolve: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Convolve ``u`` with causal kernels after the inputs ``past`` (``None`` means zeros)."""
    if past is None:
        return convolve(u, kernel)
    return convolve(torch.cat([past.to(u.dtype), u], dim=-2), kernel)[..., past.shape[-2] :, :]


def slide(
    past: Float[Tensor, "*batch past channel"],
    u: Float[Tensor, "*batch length channel"],
    starts: Bool[Tensor, "*batch length"] | None = None,
) -> Float[Tensor, "*batch past channel"]:
    """Inputs before the next chunk: the latest ones, as many as ``past`` holds, oldest first.

    Inputs of earlier documents are zeros.

    Example:
        >>> slide(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])).flatten()
        tensor([2., 3.])
    """
    kept = past.shape[-2]
    latest = u[..., max(0, u.shape[-2] - kept) :, :].to(past.dtype)
    after = torch.cat([past[..., latest.shape[-2] :, :], latest], dim=-2)
    if starts is None:
        return after
    begun = F.pad(starts.flip(-1).cumsum(-1), (1, 0))  # after the last input, the one before, ...
    ages = torch.arange(kept - 1, -1, -1, device=u.device).clamp(max=u.shape[-2])
    return after.masked_fill(begun[..., ages, None] > 0, 0.0)


def skipped(
    x: Float[Tensor, "*batch channel"], skip: Float[Tensor, " output"]
) -> Float[Tensor, "*batch output"]:
    """Skip connection of filters with one or more outputs per channel, in the dtype of ``x``."""
    if len(skip) == x.shape[-1]:
        return (skip * x).to(x.dtype)
    return (skip.unflatten(0, (-1, x.shape[-1])) * x[..., None, :]).flatten(-2).to(x.dtype)
