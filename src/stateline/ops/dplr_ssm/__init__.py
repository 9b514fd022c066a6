"""Diagonal-plus-low-rank state space model: whole sequences, chunks and single steps."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_of
from stateline.ops.containment import contained, every
from stateline.ops.declared import precise_weights
from stateline.ops.diagonal_ssm import whole_readouts
from stateline.ops.op import Example, Op, Sizes
from stateline.settings import Count


class DPLRWeights(NamedTuple):
    """Weights of diagonal-plus-low-rank state space models, one for each channel.

    Attributes:
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vector. Several readouts of every channel may follow each other: output
            ``i * channel + j`` reads channel j.
    """

    dt: Float[Tensor, " channel"]
    a: Float[Tensor, "channel mode 2"]
    p: Float[Tensor, "channel mode 2"]
    b: Float[Tensor, "channel mode 2"]
    c: Float[Tensor, "output mode 2"]


def example(sizes: Sizes, modes: int = 32) -> Example:
    """S4's recurrence, kernel included."""
    channels = sizes.d_model
    dt = torch.logspace(-3, -1, channels, dtype=sizes.precise, device=sizes.device)
    frequency = torch.pi * torch.arange(modes, dtype=sizes.precise, device=sizes.device)
    a = torch.stack([torch.full_like(frequency, -0.5), frequency], dim=-1).repeat(channels, 1, 1)
    p, b, c = (sizes.weight(channels, modes, 2) for _ in range(3))
    return Example(
        (sizes.signal(), DPLRWeights(dt, a, p, b, c), None), sizes.positions * modes * 12.0
    )


OP = Op(__name__, [], example)


@bound(OP, whole_readouts, precise_weights, autocast=False)
@contained()
def dplr_ssm(
    u: Float[Tensor, "*batch length channel"],
    weights: DPLRWeights,
    state: Float[Tensor, "*batch channel mode 2"] | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Any]:
    r"""Run state space models, diagonal plus low rank, discretised by the bilinear rule.

    .. math::
        \dot x = (\Lambda - P P^*) x + B u, \qquad y = 2\,\mathrm{Re}\, C x

    Each channel has complex vectors :math:`\Lambda`, P, B and C, and a step dt between two inputs.
    Modes come in conjugate pairs; one of each pair is stored, in the vectors and in the state,
    hence the factor 2. Complex numbers are real planes (a last axis of length 2).

    Args:
        u: Input signal.
        weights: Steps dt, the diagonal :math:`\Lambda` (``a``) in the unit of 1 / dt, P, B and C.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input: ``None`` if no
        state was given, for it would have to be computed.

    Example:
        One real mode without a low-rank part. With a decay of two thirds and a step of one, the
        state halves at each step.

        >>> import torch
        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> u = torch.tensor([[[4.0], [0.0], [0.0]]])
        >>> y, _ = dplr_ssm(u, DPLRWeights(torch.ones(1), -2 / 3 * one, 0 * one, one, one))
        >>> y.flatten().round(decimals=3)
        tensor([6.0000, 3.0000, 1.5000])

    References:
        Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022.
    """
    return backend(u, weights, state)


@bound(OP, whole_readouts, precise_weights, autocast=False)
@contained(every)
def dplr_ssm_every(
    u: Float[Tensor, "*batch length channel"],
    weights: DPLRWeights,
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


dplr_ssm_step = step_of(OP, dplr_ssm)
