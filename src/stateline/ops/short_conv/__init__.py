"""Causal convolution with a kernel of a few taps."""

from functools import partial

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, checked_step
from stateline.ops.containment import contained, filtered
from stateline.ops.convolution import convolve_after, whole_filters
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.stepping import Stepper

MOST_TAPS = {"cpu": 256, "cuda": 16}
"""Most taps of the kernels by kind of device; longer filters are faster by FFT."""


def example(sizes: Sizes, taps: int = 4) -> Example:
    """A filter of four taps, as in Mamba."""
    kernel = sizes.weight(sizes.d_model, taps)
    return Example((sizes.signal(), kernel), sizes.positions * taps * 2.0)


OP = Op(__name__, ["numba", "triton"], example)


def _past_fits(weights: Tensor, past: Tensor) -> str:
    """Why there is no filter, or the past inputs do not fit the taps, or an empty string."""
    if not len(weights):
        return "weights need at least one filter"
    if past.shape[1] != weights.shape[-2] - 1:
        return f"past needs one input fewer than the {weights.shape[-2]} taps, got {past.shape[1]}"
    return ""


@bound(OP, whole_filters, autocast=False)
@contained(filtered)
def short_conv(
    u: Float[Tensor, "*batch length channel"],
    kernel: Float[Tensor, "output taps"],
    past: Float[Tensor, "*batch past channel"] | None = None,
    *,
    starts: Bool[Tensor, "*batch length"] | None = None,
    backend: Backend = "auto",
) -> Float[Tensor, "*batch length output"]:
    r"""Convolve every channel of ``u`` with one or more short causal kernels of its own.

    .. math:: y_t = \sum_{s \ge 0} k_s\, u_{t-s}

    This is the function of :func:`stateline.ops.fft_conv`, computed tap by tap where that is
    faster.

    Args:
        u: Input signal.
        kernel: Impulse responses: first one of every channel, then a second one of every channel,
            and so on.
        past: Inputs before ``u``, oldest first; ``None`` means zeros.
        starts: True where a document begins: earlier inputs are zeros to it.

    Returns:
        Output signals, in the order of the kernels and the dtype of ``u``.

    Raises:
        InputError: If the number of kernels is not a multiple of the number of channels.

    Example:
        >>> import torch
        >>> u = torch.tensor([[[1.0], [2.0], [4.0]]])
        >>> short_conv(u, torch.tensor([[1.0, -1.0]])).flatten()
        tensor([1., 1., 2.])
    """
    if past is not None and starts is not None:
        starts = F.pad(starts, (past.shape[-2], 0))
    return convolve_after(past, u, kernel, partial(backend, starts=starts))


@bound(OP, _past_fits)
def short_conv_step(
    u: Float[Tensor, "batch channel"],
    weights: Float[Tensor, "filter taps channel"],
    past: Float[Tensor, "batch past channel"],
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch output"], Float[Tensor, "batch past channel"]]:
    """Convolve one input, and shift the past by one.

    Args:
        u: Input.
        weights: For each filter a kernel per channel, as ``kernel.flip(-1).mT``: the tap of the
            oldest input comes first, as in ``past``.
        past: Inputs before ``u``, oldest first: one fewer than there are taps.

    Returns:
        Outputs of the first filter, of the second, and so on, in the wider dtype of ``weights``
        and ``past``; and the past of the next input.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[[-1.0], [1.0]]])
        >>> short_conv_step(torch.tensor([[4.0]]), weights, torch.tensor([[[1.0]]]))
        (tensor([[3.]]), tensor([[[4.]]]))
    """
    return backend(u, weights, past)


@bound(OP, lambda weights: "" if len(weights) else "the kernels need at least one tap")
def short_conv_stepper(
    weights: Float[Tensor, "taps channel"], *, backend: Backend = "auto"
) -> Stepper:
    """Prepare the convolution of many single inputs without gradients.

    Args:
        weights: One kernel per channel as ``kernel.flip(-1).mT``: the tap of the oldest input comes
            first, as in the state.

    Returns:
        ``stepper(u, past)`` returns the output for one input ``(batch, channel)`` in the dtype of
        ``past``, and changes ``past``, the latest inputs with the oldest first. It does not follow
        later changes of the weights.
    """
    step = backend(weights)
    return checked_step(step, short_conv_step, (weights,), lambda u, past: (u, weights[None], past))
