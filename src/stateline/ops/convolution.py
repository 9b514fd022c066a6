"""What the causal convolutions share: the past of a signal, and how it slides along."""

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
    """Convolve ``u``, which follows ``past`` (zeros if ``None``), with causal kernels.

    Raises:
        InputError: If the kernels are not as many for every channel.
    """
    if not kernel.shape[0] or not u.shape[-1] or kernel.shape[0] % u.shape[-1]:
        raise InputError(
            f"a convolution needs as many kernels for every channel: u has {u.shape[-1]} channels "
            f"(shape {tuple(u.shape)}), kernel has {kernel.shape[0]} (shape {tuple(kernel.shape)})"
        )
    if past is None:
        return convolve(u, kernel)
    return convolve(torch.cat([past.to(u.dtype), u], dim=-2), kernel)[..., past.shape[-2] :, :]


def slide(
    past: Float[Tensor, "*batch past channel"], u: Float[Tensor, "*batch length channel"]
) -> Float[Tensor, "*batch past channel"]:
    """Inputs before the next chunk: as many of the latest as ``past`` holds, oldest first.

    Example:
        >>> slide(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])).flatten()
        tensor([2., 3.])
    """
    kept = past.shape[-2]
    latest = u[..., max(0, u.shape[-2] - kept) :, :].to(past.dtype)
    return torch.cat([past[..., latest.shape[-2] :, :], latest], dim=-2)
