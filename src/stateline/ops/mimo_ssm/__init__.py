"""Diagonal state space model with many inputs and outputs: sequences and steps."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_of
from stateline.ops.containment import contained
from stateline.ops.declared import one_precision
from stateline.ops.op import Example, Op, Sizes


class MIMOWeights(NamedTuple):
    """Weights of a diagonal state space model with many inputs and outputs.

    Attributes:
        log_a: Logarithm of the transition.
        b: Input matrix.
        c: Output matrix.
    """

    log_a: Float[Tensor, "mode 2"]
    b: Float[Tensor, "mode channel 2"]
    c: Float[Tensor, "output mode 2"]


def example(sizes: Sizes, modes: int = 32) -> Example:
    """S5's recurrence, with time scales of 10 to 1,000."""
    dt = torch.logspace(-3, -1, modes, dtype=sizes.precise, device=sizes.device)
    frequency = torch.pi * torch.arange(modes, dtype=sizes.precise, device=sizes.device)
    log_a = torch.stack([-0.5 * dt, dt * frequency], dim=-1)
    b, c = sizes.weight(modes, sizes.d_model, 2), sizes.weight(sizes.d_model, modes, 2)
    flops = sizes.positions * modes * 8.0
    return Example((sizes.signal(), MIMOWeights(log_a, dt[:, None, None] * b, c)), flops)


OP = Op(__name__, [], example)


@bound(
    OP,
    lambda weights, state: one_precision("weights and state need", weights, state),
    autocast=False,
)
@contained()
def mimo_ssm(
    u: Float[Tensor, "*batch length channel"],
    weights: MIMOWeights,
    state: Float[Tensor, "*batch mode 2"] | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch mode 2"]]:
    r"""Run one diagonal state space model with many inputs and outputs.

    .. math:: x_t = a \odot x_{t-1} + B u_t, \qquad y_t = 2\,\mathrm{Re}\, C x_t

    All channels share one complex state x. Modes come in conjugate pairs; one of each pair is
    stored, hence the factor 2. Complex numbers are real planes (a last axis of length 2).

    Args:
        u: Input signals.
        weights: Logarithm of the transition a, and matrices B and C.

    Returns:
        Output signals in the dtype of ``u``, and the state after the last input.

    Example:
        Two signals drive one real mode that halves at each step.

        >>> log_a = torch.tensor([[0.5, 1.0]]).log()
        >>> b = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
        >>> u = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
        >>> y, state = mimo_ssm(u, MIMOWeights(log_a, b, torch.tensor([[[0.5, 0.0]]])))
        >>> y.flatten().mul(100).round()
        tensor([100., 350., 175.])

    References:
        Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023.
    """
    if state is None:
        state = weights.log_a.new_zeros(*u.shape[:-2], *weights.log_a.shape)
    return backend(u, weights, state)


mimo_ssm_step = step_of(OP, mimo_ssm, autocast=False)
