r"""Diagonal-plus-low-rank state space model, discretised by the bilinear rule.

.. math::
    \dot x = (\Lambda - P P^*) x + B u, \qquad y = C x

Each channel has complex vectors Lambda (``a``), P, B and C and a step dt. Modes come in conjugate
pairs; one of each pair is stored, in the vectors and in the state. Complex numbers are real planes
(a last axis of length 2).

Shapes: ``u`` is ``(*batch, length, channel)``, ``dt`` ``(channel,)``, ``a``, ``p`` and ``b`` are
``(channel, mode, 2)``; ``c`` is ``(readout * channel, mode, 2)``, where output ``i * channel + j``
reads channel j; a state is ``(*batch, channel, mode, 2)``, at least float32.

References:
    Gu et al., "Efficiently Modeling Long Sequences with Structured State Spaces", ICLR 2022.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import dispatch, own_precision
from stateline.ops.dplr_ssm import cauchy, pytorch, reference
from stateline.ops.op import Op

OP = Op("dplr_ssm", {"torch": pytorch, "cauchy": cauchy, "reference": reference})


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
    """Response to a whole sequence, from the zero state.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signal, in the dtype of ``u``.

    Example:
        One real mode without a low-rank part. With a decay of two thirds and a step of one, the
        state halves at each step.

        >>> import torch
        >>> one = torch.tensor([[[1.0, 0.0]]])
        >>> u = torch.tensor([[[4.0], [0.0], [0.0]]])
        >>> y = dplr_ssm(u, torch.ones(1), -2 / 3 * one, 0 * one, one, one)
        >>> y.flatten().round(decimals=3)
        tensor([6.0000, 3.0000, 1.5000])
    """
    return dispatch(OP, "dplr_ssm", u, dt, a, p, b, c, backend=backend)


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
    """Response to the next chunk of a sequence, and the state after it.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        state: State before the first of these inputs.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.
    """
    return dispatch(OP, "dplr_ssm_chunk", u, dt, a, p, b, c, state, backend=backend)


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
    """Response from the zero state, at every ``stride``-th position only.

    It costs less than the whole response if ``c`` has many readouts.

    Args:
        u: Input signal.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        stride: Inputs per output, at least 1.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs at positions ``stride - 1``, ``2 * stride - 1``, ..., in the dtype of ``u``.
    """
    return dispatch(OP, "dplr_ssm_every", u, dt, a, p, b, c, stride, backend=backend)


def dplr_ssm_step(
    u: Float[Tensor, "*batch channel"],
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next input, and the state after it: one step of the recurrence.

    Args:
        u: Input.
        dt: Step.
        a: Diagonal part of the transition.
        p: Low-rank part.
        b: Input vector.
        c: Output vectors.
        state: State before this input.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output in the dtype of ``u``, and the state after the input.
    """
    return dispatch(OP, "dplr_ssm_step", u, dt, a, p, b, c, state, backend=backend)
