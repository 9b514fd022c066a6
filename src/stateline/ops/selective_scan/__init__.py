r"""Selective scan: a diagonal state space model whose step, input and output follow the input.

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
from stateline.ops.backend import choose, own_precision
from stateline.ops.selective_scan import pytorch, reference
from stateline.ops.selective_scan.reference import selective_scan_step

BACKENDS = {"torch": pytorch, "reference": reference}

__all__ = ["BACKENDS", "selective_scan", "selective_scan_step"]


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
    r"""Response to the next piece of a sequence, and the state after it.

    Computed in the dtype of the state. The memory kept for the backward pass is that of the inputs:
    states are computed again.

    Args:
        u: Input signal.
        dt: Step :math:`\Delta`, positive.
        a: Diagonal A of the transition, negative.
        b: Input vector B, one for each group of neighbouring channels; without batch and length,
            it is the same at all times, and every channel has its own.
        c: Output vector C, likewise.
        state: State before the first of these inputs.
        backend: Implementation, by default the fastest.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.

    Raises:
        InputError: If the number of groups does not divide the number of channels.

    Example:
        With steps of log 2, a state of A = -1 halves each time.

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
    return choose("selective_scan", BACKENDS, backend).selective_scan(u, dt, a, b, c, state)
