"""Selective scan: whole sequences, chunks and single steps."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_in_place, step_of
from stateline.ops.containment import contained
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.starts import Starts
from stateline.ops.stepping import zeros_before


class ScanSignals(NamedTuple):
    r"""The signals of a selective scan.

    Attributes:
        u: Input signal.
        dt: Step :math:`\Delta`, positive.
        b: Input vector B of each group of adjacent channels.
        c: Output vector C of each group.
    """

    u: Float[Tensor, "batch length channel"]
    dt: Float[Tensor, "batch length channel"]
    b: Float[Tensor, "batch length group d_state"]
    c: Float[Tensor, "batch length group d_state"]


def example(sizes: Sizes, d_state: int = 16) -> Example:
    """Mamba's scan."""
    u, (b, c) = sizes.signal(), (sizes.signal(1, d_state) for _ in range(2))
    dt = F.softplus(sizes.weight(*u.shape) - 4)
    rates = -torch.arange(1.0, d_state + 1, dtype=sizes.precise, device=sizes.device)
    inputs = ScanSignals(u, dt, b, c), rates.repeat(sizes.d_model, 1)
    return Example(inputs, sizes.positions * d_state * 6.0)


OP = Op(__name__, ["numba", "mamba_ssm", "triton"], example)


def _groups_divide(x: ScanSignals) -> str:
    """Why the groups do not fit the channels, or an empty string."""
    groups, channels = x.b.shape[-2], x.u.shape[-1]
    if groups and channels % groups == 0:
        return ""
    return f"the groups of b and c must divide the channels, got {groups} and {channels}"


@bound(OP, _groups_divide, autocast=False)
@contained()
def selective_scan(
    x: ScanSignals,
    a: Float[Tensor, "channel d_state"],
    state: Float[Tensor, "batch channel d_state"] | None = None,
    *,
    starts: Starts | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length channel"], Float[Tensor, "batch channel d_state"]]:
    r"""Run a diagonal state space model whose step, B and C depend on the input.

    .. math::
        h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t u_t B_t, \qquad y_t = C_t \cdot h_t

    Each channel has its own real state h; B and C are shared by the channels of a group. Computed
    in the dtype of the state. Only the inputs are saved for the backward pass, which recomputes the
    states.

    Args:
        x: Input signal u, steps :math:`\Delta`, and vectors B and C.
        a: Diagonal A of the transition, negative, in the unit of 1 / :math:`\Delta`.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.

    Example:
        With steps of log 2 and A = -1, the state halves at each step.

        >>> u, dt = torch.tensor([[[1.0], [0.0]]]), torch.full((1, 2, 1), 2.0).log()
        >>> a, one = -torch.ones(1, 1), torch.ones(1, 2, 1, 1)
        >>> y, state = selective_scan(ScanSignals(u, dt, one, one), a, torch.ones(1, 1, 1))
        >>> y.flatten().mul(100).round()
        tensor([119.,  60.])

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        section 3.2.
    """
    if state is None:
        state = zeros_before(x.u, len(x.u), *a.shape)
    return backend(x, a, state, starts=starts)


selective_scan_step = step_of(OP, selective_scan)
selective_scan_step_ = step_in_place(OP, selective_scan)
