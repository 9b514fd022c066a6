"""Causal long convolution, in O(L log L) by the fast Fourier transform."""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import choose, own_precision
from stateline.ops.convolution import convolve_after
from stateline.ops.fft_conv import pytorch, reference

BACKENDS = {"torch": pytorch, "reference": reference}


@own_precision
def fft_conv(
    u: Float[Tensor, "*batch length channel"],
    kernel: Float[Tensor, "output taps"],
    past: Float[Tensor, "*batch past channel"] | None = None,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch length output"]:
    r"""Convolve every channel of ``u`` with causal kernels of its own, one or several.

    Computes :math:`y_t = \sum_{s \ge 0} k_s\, u_{t-s}`. The FFT runs in float32 (float64 for
    float64 input) whatever the input dtype. Only ``u`` and ``kernel`` are kept for the backward
    pass.

    Args:
        u: Input signal.
        kernel: Impulse responses: that of every channel, then a second one of every channel, and
            so on. Taps that reach back beyond the first input meet zeros.
        past: Inputs before ``u``, oldest first; ``None`` means zeros. It is the state of a layer
            that convolves chunk by chunk: see :func:`stateline.ops.slide`.
        backend: Implementation, by default the fastest.

    Returns:
        Output signals, in the order of the kernels and the dtype of ``u``.

    Raises:
        InputError: If the kernels are not as many for every channel.

    Example:
        A kernel of one unit tap, delayed by two steps, delays the signal by two steps.

        >>> import torch
        >>> u = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        >>> fft_conv(u, torch.tensor([[0.0, 0.0, 1.0]])).flatten().round().abs()
        tensor([0., 0., 1., 2.])

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 4.1.
    """
    return convolve_after(past, u, kernel, choose("fft_conv", BACKENDS, backend).fft_conv)
