r"""Diagonal-plus-low-rank state space model, discretised by the bilinear rule, in its three verbs.

.. math::
    \dot x = (\Lambda - P P^*) x + B u, \qquad y = C x

Each channel has complex vectors Lambda (``a``), P, B and C and a step dt. Of the modes, and of the
state, half is kept: the other half is its conjugate, in all of them. Complex numbers are real
planes (a last axis of length 2).

Shapes: ``u`` is ``(*batch, length, channel)``, ``dt`` ``(channel,)``, ``a``, ``p`` and ``b`` are
``(channel, mode, 2)``; ``c`` is ``(readout * channel, mode, 2)``, where output ``i * channel + j``
reads channel j; a state is ``(*batch, channel, mode, 2)``, at least float32.

References:
    Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import choose, own_precision
from stateline.ops.dplr_ssm import cauchy, pytorch, reference
from stateline.ops.planes import multiply

BACKENDS = {"torch": pytorch, "cauchy": cauchy, "reference": reference}


@own_precision
def dplr_ssm(
    u: Float[Tensor, "*batch length channel"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch length output"]:
    """Response to a whole sequence, from the zero state: a convolution.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        backend: Implementation, by default the fastest.

    Returns:
        Output signal, in the dtype of ``u``.

    Example:
        One real mode, of which both halves are the same, and no low-rank part: with a decay of two
        thirds and a step of one, a state halves at each step.

        >>> import torch
        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> u = torch.tensor([[[4.0], [0.0], [0.0]]])
        >>> y = dplr_ssm(u, torch.ones(1), -2 / 3 * one, 0 * one, one, one)
        >>> y.flatten().round(decimals=3)
        tensor([6.0000, 3.0000, 1.5000])
    """
    return choose("dplr_ssm", BACKENDS, backend).dplr_ssm(u, dt, a, p, b, c)


@own_precision
def dplr_ssm_chunk(
    u: Float[Tensor, "*batch length channel"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next piece of a sequence, and the state after it.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        state: State before the first of these inputs.
        backend: Implementation, by default the fastest.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.
    """
    return choose("dplr_ssm", BACKENDS, backend).dplr_ssm_chunk(u, dt, a, p, b, c, state)


@own_precision
def dplr_ssm_every(
    u: Float[Tensor, "*batch length channel"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    stride: int,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch taken output"]:
    """The response from the zero state at every ``stride``-th input only: at the last of each.

    That costs less than the whole response: what many readouts see is computed rarely.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        stride: Inputs per output, at least 1.
        backend: Implementation, by default the fastest.

    Returns:
        Outputs ``stride - 1``, ``2 * stride - 1``, ... of the signal, in the dtype of ``u``.
    """
    every = choose("dplr_ssm", BACKENDS, backend).dplr_ssm_every
    return every(u, dt, a, p, b, c, stride)


def dplr_ssm_step(
    u: Float[Tensor, "*batch channel"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next input, and the state after it; linear in the number of modes."""
    drive = dt[:, None, None] * b * u.to(state.dtype)[..., None, None]
    state = pytorch.advance(state, drive, dt, a, p)
    readouts = c.unflatten(0, (-1, u.shape[-1]))
    y = 2 * multiply(readouts, state[..., None, :, :, :])[..., 0].sum(dim=-1)
    return y.flatten(-2).to(u.dtype), state
