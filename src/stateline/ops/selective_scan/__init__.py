r"""Selective scan: a diagonal state space model with input-dependent step, B and C.

.. math::
    h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t u_t B_t, \qquad y_t = C_t \cdot h_t

Each channel has its own real state h; B and C are shared by the channels of a group.

References:
    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, section
    3.2.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.op import Op
from stateline.ops.selective_scan import pytorch, reference

OP = Op(
    "selective_scan",
    {
        "numba": "stateline.ops.selective_scan.numba_backend",
        "mamba_ssm": "stateline.ops.selective_scan.mamba_backend",
        "triton": "stateline.ops.selective_scan.triton_backend",
        "torch": pytorch,
        "reference": reference,
    },
)

__all__ = ["OP", "selective_scan", "selective_scan_step"]


@own_precision
def selective_scan(
    u: Float[Tensor, "batch length channel"],
    dt: Float[Tensor, "batch length channel"],
    a: Float[Tensor, "channel d_state"],
    b: Float[Tensor, "batch length group d_state"] | Float[Tensor, "channel d_state"],
    c: Float[Tensor, "batch length group d_state"] | Float[Tensor, "channel d_state"],
    state: Float[Tensor, "batch channel d_state"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length channel"], Float[Tensor, "batch channel d_state"]]:
    r"""Response to the next chunk of a sequence, and the state after it.

    Computed in the dtype of the state. Only the inputs are saved for the backward pass, which
    recomputes the states.

    Args:
        u: Input signal.
        dt: Step :math:`\Delta`, positive.
        a: Diagonal A of the transition, negative.
        b: Input vector B of each group of adjacent channels; or, without batch and length, one of
            each channel for all times.
        c: Output vector C, in the same form as ``b`` or in the other one.
        state: State before the first of these inputs.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.

    Raises:
        InputError: If the number of groups does not divide the number of channels.

    Example:
        With steps of log 2 and A = -1, the state halves at each step.

        >>> import torch
        >>> u, dt = torch.tensor([[[1.0], [0.0]]]), torch.full((1, 2, 1), 2.0).log()
        >>> one = torch.ones(1, 1)
        >>> y, state = selective_scan(u, dt, -one, one, one, torch.ones(1, 1, 1))
        >>> y.flatten().mul(100).round()
        tensor([119.,  60.])
    """
    batch, length, channels = u.shape
    b, c = (t.expand(batch, length, *t.shape) if t.ndim == 2 else t for t in (b, c))
    if channels % b.shape[2] or b.shape[2] != c.shape[2]:
        raise InputError(
            "b and c need the same number of groups, which divides the number of channels: "
            f"got {b.shape[2]} and {c.shape[2]} groups for {channels} channels"
        )
    return dispatch(OP, "selective_scan", u, dt, a, b, c, state, backend=backend)


def selective_scan_step(
    u: Float[Tensor, "batch channel"],
    dt: Float[Tensor, "batch channel"],
    a: Float[Tensor, "channel d_state"],
    b: Float[Tensor, "batch group d_state"],
    c: Float[Tensor, "batch group d_state"],
    state: Float[Tensor, "batch channel d_state"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch channel"], Float[Tensor, "batch channel d_state"]]:
    r"""Response to the next input, and the state after it: one step of the recurrence.

    Args:
        u: Input.
        dt: Step :math:`\Delta`, positive.
        a: Diagonal A of the transition, negative.
        b: Input vector B of each group of adjacent channels.
        c: Output vector C of each group.
        state: State before this input.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output in the dtype of ``u``, and the state after the input.
    """
    return dispatch(OP, "selective_scan_step", u, dt, a, b, c, state, backend=backend)


def selective_scan_step_(
    u: Float[Tensor, "batch channel"],
    dt: Float[Tensor, "batch channel"],
    a: Float[Tensor, "channel d_state"],
    b: Float[Tensor, "batch group d_state"],
    c: Float[Tensor, "batch group d_state"],
    state: Float[Tensor, "batch channel d_state"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "batch channel"]:
    """Response to the next input without gradients; the state changes in place.

    Arguments are those of :func:`selective_scan_step`.

    Returns:
        Output in the dtype of ``u``.
    """
    return dispatch(OP, "selective_scan_step_", u, dt, a, b, c, state, backend=backend)
