"""Diagonal state space model: whole sequences, chunks and single steps."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, checked_step, step_of
from stateline.ops.containment import contained, every
from stateline.ops.declared import precise_weights
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.stepping import Stepper
from stateline.settings import Count


class DiagonalWeights(NamedTuple):
    """Weights of diagonal state space models, one for each channel.

    Attributes:
        log_a: Logarithm of the transition. If it has a single channel, all channels share it, and
            its powers are computed once.
        b: Input vector.
        c: Output vector. Several readouts of every channel may follow each other: output
            ``i * channel + j`` reads channel j.
    """

    log_a: Float[Tensor, "#channel mode 2"]
    b: Float[Tensor, "channel mode 2"]
    c: Float[Tensor, "output mode 2"]


def example(sizes: Sizes, modes: int = 32) -> Example:
    """S4D's recurrence, kernel included, with time scales of 10 to 1,000."""
    weights = example_weights(sizes.d_model, modes, sizes)
    return Example((sizes.signal(), weights, None), sizes.positions * modes * 12.0)


def example_weights(channels: int, modes: int, sizes: Sizes) -> DiagonalWeights:
    """Weights as S4D has them at the beginning of training."""
    dt = torch.logspace(-3, -1, channels, dtype=sizes.precise, device=sizes.device)[:, None]
    frequency = torch.pi * torch.arange(modes, dtype=sizes.precise, device=sizes.device)
    log_a = torch.stack([-0.5 * dt.expand(channels, modes), dt * frequency], dim=-1)
    b, c = (sizes.weight(channels, modes, 2) for _ in range(2))
    return DiagonalWeights(log_a, dt[..., None] * b, c)


OP = Op(__name__, ["numba", "triton"], example)

MOST_MODES = 64
"""Most modes whose tables fit into the memory of a GPU's multiprocessor."""


def whole_readouts(u: Tensor, weights: Any) -> str:
    """Why the outputs do not fit the channels, or an empty string."""
    outputs, channels = len(weights.c), u.shape[-1]
    if not channels or not outputs or outputs % channels:
        return f"weights.c needs a multiple of {channels} outputs (channels), got {outputs}"
    return ""


@bound(OP, whole_readouts, precise_weights, autocast=False)
@contained()
def diagonal_ssm(
    u: Float[Tensor, "*batch length channel"],
    weights: DiagonalWeights,
    state: Float[Tensor, "*batch channel mode 2"] | None = None,
    *,
    starts: Bool[Tensor, "*batch length"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Any]:
    r"""Run a diagonal state space model in every channel.

    .. math:: x_t = a\, x_{t-1} + b\, u_t, \qquad y_t = 2\,\mathrm{Re} \sum_n c_n x_{t,n}

    Each channel has its own complex vectors a, b, c and its own state x. Modes come in conjugate
    pairs; one of each pair is stored, hence the factor 2. Complex numbers are real planes (a last
    axis of length 2). From the zero state, the output is the convolution with
    :math:`k_t = 2\,\mathrm{Re} \sum_n c_n b_n a_n^t`. The ``torch`` backend computes it in this
    way; see :func:`stateline.ops.fft_conv` for its rounding.

    Args:
        u: Input signal.
        weights: Logarithm of a, b and c.
        starts: True where a document begins, which then does not see earlier inputs. A state
            continues the first document of a row, unless ``starts`` is true at its first position.
            The backends ``torch`` and ``reference`` are slower with ``starts`` than on documents
            that are cut out.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input: ``None`` if no
        state was given, for it would have to be computed.

    Example:
        One real mode that halves at each step.

        >>> import torch
        >>> log_a = torch.tensor([[[0.5, 1.0]]]).log()
        >>> one, half = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.5, 0.0]]])
        >>> u = torch.tensor([[[1.0], [0.0], [0.0]]])
        >>> y, _ = diagonal_ssm(u, DiagonalWeights(log_a, one, half))
        >>> y.flatten().mul(100).round()
        tensor([100.,  50.,  25.])

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022, section 3; Fu et al., "Hungry Hungry Hippos", ICLR 2023, algorithm 2 (state
        passing).
    """
    return backend(u, weights, state, starts=starts)


@bound(OP, whole_readouts, precise_weights, autocast=False)
@contained(every)
def diagonal_ssm_every(
    u: Float[Tensor, "*batch length channel"],
    weights: DiagonalWeights,
    stride: Count,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "*batch taken output"]:
    """Response from the zero state, at every ``stride``-th position only.

    It costs less than the whole response if the weights have many readouts.

    Args:
        u: Input signal.
        weights: Weights.
        stride: Inputs per output, at least 1.

    Returns:
        Outputs at positions ``stride - 1``, ``2 * stride - 1``, ..., in the dtype of ``u``.
    """
    return backend(u, weights, stride)


diagonal_ssm_step = step_of(OP, diagonal_ssm)


@bound(OP)
def diagonal_ssm_stepper(
    weights: DiagonalWeights, skip: Float[Tensor, " output"], *, backend: Backend = "auto"
) -> Stepper:
    """Prepare many steps without gradients, each with a skip connection.

    Values that depend only on the weights are computed here once, and the state changes in place.

    Args:
        weights: Weights.
        skip: Weight of the input of each output's channel.

    Returns:
        ``stepper(u, state)`` returns the output for one input, the one of
        :func:`diagonal_ssm_step` plus the skip connection, and changes ``state``. It does not
        follow later changes of the weights.
    """
    step = backend(weights, skip)
    return checked_step(step, diagonal_ssm_step, weights, lambda u, state: (u, weights, state))
