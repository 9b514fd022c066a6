"""Linear scan: a recurrence of each channel by itself, whose factors are signals."""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_in_place, step_of
from stateline.ops.containment import contained
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.starts import Starts
from stateline.ops.stepping import zeros_before


def example(sizes: Sizes) -> Example:
    """Gates between zero and one."""
    f, b = sizes.signal().sigmoid(), sizes.signal()
    return Example((f, b), sizes.positions * 2.0)


OP = Op(__name__, ["numba"], example)


@bound(OP, autocast=False)
@contained()
def linear_scan(
    f: Float[Tensor, "batch length channel"],
    b: Float[Tensor, "batch length channel"],
    state: Float[Tensor, "batch channel"] | None = None,
    *,
    starts: Starts | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length channel"], Float[Tensor, "batch channel"]]:
    r"""Multiply each channel by a factor and add an input, at every token.

    .. math:: h_t = f_t \odot h_{t-1} + b_t

    Both may depend on the data, as in a gated recurrence: :math:`b_t = (1 - f_t) \odot x_t` makes a
    moving average whose memory the input chooses. Computed in the dtype of the state. Only the
    inputs are saved for the backward pass, which computes the states again.

    Args:
        f: Factors, usually from -1 to 1: beyond, states grow exponentially.
        b: Inputs.

    Returns:
        All states, in the dtype of ``b``, and the state after the last token.

    Example:
        >>> import torch
        >>> half, one = torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)
        >>> h, state = linear_scan(half, one)
        >>> h.flatten(), state.flatten()
        (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))

    References:
        Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length",
        ICLR 2018.
    """
    if state is None:
        state = zeros_before(b, len(b), b.shape[2])
    return backend(f, b, state, starts=starts)


linear_scan_step = step_of(OP, linear_scan)
linear_scan_step_ = step_in_place(OP, linear_scan)
