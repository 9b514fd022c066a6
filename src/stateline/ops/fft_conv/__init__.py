"""Causal long convolution, in O(L log L) by the fast Fourier transform."""

import math

from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.containment import contained, filtered
from stateline.ops.convolution import convolve_after, whole_filters
from stateline.ops.op import Example, Op, Sizes


def example(sizes: Sizes) -> Example:
    """A kernel that is as long as the sequence."""
    kernel = sizes.weight(sizes.d_model, sizes.length)
    return Example((sizes.signal(), kernel), sizes.positions * convolution_flops(sizes.length))


def convolution_flops(length: int) -> float:
    """Operations per token and channel: two real FFTs of twice the length, and the product."""
    return 2 * 2.5 * 2 * math.log2(2 * length) + 6


OP = Op(__name__, ["triton"], example)


@bound(OP, whole_filters, autocast=False)
@contained(filtered)
def fft_conv(
    u: Float[Tensor, "*batch length channel"],
    kernel: Float[Tensor, "output taps"],
    past: Float[Tensor, "*batch past channel"] | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "*batch length output"]:
    r"""Convolve every channel of ``u`` with one or more causal kernels of its own.

    .. math:: y_t = \sum_{s \ge 0} k_s\, u_{t-s}

    The FFT runs in float32, for float64 inputs in float64. Only ``u`` and ``kernel`` are saved for
    the backward pass.

    Limit: the FFT of the ``torch`` backend spreads rounding errors over all positions, in both
    directions, in float32 up to 1e-7 of the largest input of the row times the norm of the kernel.
    So an outlier also changes earlier outputs: in an H3 layer, a last input of 1e4 changed earlier
    outputs, of size 3.6, by up to 0.34. Where this matters, use the backend ``reference``, float64
    inputs, or for state space models the recurrence: :func:`diagonal_ssm` on the backend ``numba``.

    Args:
        u: Input signal.
        kernel: Impulse responses: first one of every channel, then a second one of every channel,
            and so on.
        past: Inputs before ``u``, oldest first; ``None`` means zeros. It is the state of a layer
            that convolves chunk by chunk; :func:`stateline.ops.slide` updates it.

    Returns:
        Output signals, in the order of the kernels and the dtype of ``u``.

    Raises:
        InputError: If the number of kernels is not a multiple of the number of channels.

    Example:
        A kernel of one unit tap, delayed by two steps, delays the signal by two steps.

        >>> import torch
        >>> u = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        >>> fft_conv(u, torch.tensor([[0.0, 0.0, 1.0]])).flatten().round().abs()
        tensor([0., 0., 1., 2.])

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 4.1.
    """
    return convolve_after(past, u, kernel, backend)
