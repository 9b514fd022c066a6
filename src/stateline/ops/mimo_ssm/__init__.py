r"""Diagonal state space model with many inputs and outputs.

.. math:: x_t = a \odot x_{t-1} + B u_t, \qquad y_t = 2\,\mathrm{Re}\, C x_t

All channels share one complex state x. Modes come in conjugate pairs; one of each pair is stored,
hence the factor 2. Complex numbers are real planes (a last axis of length 2).

Shapes: ``u`` is ``(*batch, length, channel)``, ``log_a`` ``(mode, 2)``, ``b``
``(mode, channel, 2)``, ``c`` ``(output, mode, 2)``; a state is ``(*batch, mode, 2)``, at least
float32.

References:
    Smith et al., "Simplified State Space Layers for Sequence Modeling", ICLR 2023.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import dispatch, own_precision
from stateline.ops.mimo_ssm import pytorch, reference
from stateline.ops.op import Op

OP = Op("mimo_ssm", {"torch": pytorch, "reference": reference})


def mimo_ssm(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "mode 2"],
    b: Float[Tensor, "mode channel 2"],
    c: Float[Tensor, "output mode 2"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch length output"]:
    """Response to a whole sequence, from the zero state.

    Args:
        u: Input signals.
        log_a: Logarithm of the transition.
        b: Input matrix.
        c: Output matrix.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signals, in the dtype of ``u``.

    Example:
        Two signals drive one real mode that halves at each step.

        >>> log_a = torch.tensor([[0.5, 1.0]]).log()
        >>> b = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
        >>> u = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
        >>> y = mimo_ssm(u, log_a, b, torch.tensor([[[0.5, 0.0]]]))
        >>> y.flatten().mul(100).round()
        tensor([100., 350., 175.])
    """
    dtype = torch.promote_types(u.dtype, log_a.dtype)
    state = torch.zeros(*u.shape[:-2], *log_a.shape, dtype=dtype, device=u.device)
    return mimo_ssm_chunk(u, log_a, b, c, state, backend=backend)[0]


@own_precision
def mimo_ssm_chunk(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "mode 2"],
    b: Float[Tensor, "mode channel 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch mode 2"]]:
    """Response to the next chunk of a sequence, and the state after it.

    Args:
        u: Input signals.
        log_a: Logarithm of the transition.
        b: Input matrix.
        c: Output matrix.
        state: State before the first of these inputs.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signals in the dtype of ``u``, and the state after the last input.
    """
    return dispatch(OP, "mimo_ssm_chunk", u, log_a, b, c, state, backend=backend)


@own_precision
def mimo_ssm_step(
    u: Float[Tensor, "*batch channel"],
    log_a: Float[Tensor, "mode 2"],
    b: Float[Tensor, "mode channel 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch mode 2"]]:
    """Response to the next inputs, and the state after them: one step of the recurrence.

    Args:
        u: Inputs.
        log_a: Logarithm of the transition.
        b: Input matrix.
        c: Output matrix.
        state: State before these inputs.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``u``, and the state after the inputs.
    """
    return dispatch(OP, "mimo_ssm_step", u, log_a, b, c, state, backend=backend)
