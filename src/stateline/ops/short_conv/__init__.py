"""Causal convolution with a kernel of a few taps."""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import choose, own_precision
from stateline.ops.convolution import convolve_after
from stateline.ops.short_conv import pytorch, reference

BACKENDS = {"torch": pytorch, "reference": reference}


@own_precision
def short_conv(
    u: Float[Tensor, "*batch length channel"],
    kernel: Float[Tensor, "output taps"],
    past: Float[Tensor, "*batch past channel"] | None = None,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch length output"]:
    r"""Convolve every channel of ``u`` with short causal kernels of its own, one or several.

    The same function as :func:`stateline.ops.fft_conv`,
    :math:`y_t = \sum_{s \ge 0} k_s\, u_{t-s}`, tap by tap as long as that is the faster way.

    Args:
        u: Input signal.
        kernel: Impulse responses: that of every channel, then a second one of every channel, and
            so on.
        past: Inputs before ``u``, oldest first; ``None`` means zeros.
        backend: Implementation, by default the fastest.

    Returns:
        Output signals, in the order of the kernels and the dtype of ``u``.

    Raises:
        InputError: If the kernels are not as many for every channel.

    Example:
        >>> import torch
        >>> u = torch.tensor([[[1.0], [2.0], [4.0]]])
        >>> short_conv(u, torch.tensor([[1.0, -1.0]])).flatten()
        tensor([1., 1., 2.])
    """
    return convolve_after(past, u, kernel, choose("short_conv", BACKENDS, backend).short_conv)
