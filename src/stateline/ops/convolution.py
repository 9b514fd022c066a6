"""Shared by the causal convolutions: inputs before a signal, and how they are updated."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError


def convolve_after(
    past: Float[Tensor, "*batch past channel"] | None,
    u: Float[Tensor, "*batch length channel"],
    kernel: Float[Tensor, "output taps"],
    convolve: Callable[[Tensor, Tensor], Tensor],
) -> Float[Tensor, "*batch length output"]:
    """Convolve ``u`` with causal kernels after the inputs ``past`` (``None`` means zeros).

    Raises:
        InputError: If the number of kernels is not a multiple of the number of channels.
    """
    if not kernel.shape[0] or not u.shape[-1] or kernel.shape[0] % u.shape[-1]:
        raise InputError(
            "the number of kernels must be a multiple of the number of channels: "
            f"got a kernel of shape {tuple(kernel.shape)} and u of shape {tuple(u.shape)}"
        )
    if past is None:
        return convolve(u, kernel)
    return convolve(torch.cat([past.to(u.dtype), u], dim=-2), kernel)[..., past.shape[-2] :, :]


def slide(
    past: Float[Tensor, "*batch past channel"], u: Float[Tensor, "*batch length channel"]
) -> Float[Tensor, "*batch past channel"]:
    """Inputs before the next chunk: the latest ones, as many as ``past`` holds, oldest first.

    Example:
        >>> slide(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])).flatten()
        tensor([2., 3.])
    """
    kept = past.shape[-2]
    latest = u[..., max(0, u.shape[-2] - kept) :, :].to(past.dtype)
    return torch.cat([past[..., latest.shape[-2] :, :], latest], dim=-2)


def skipped(
    x: Float[Tensor, "*batch channel"], skip: Float[Tensor, " output"]
) -> Float[Tensor, "*batch output"]:
    """Skip connection of filters with one or more outputs per channel, in the dtype of ``x``."""
    return (skip.unflatten(0, (-1, x.shape[-1])) * x[..., None, :]).flatten(-2).to(x.dtype)
