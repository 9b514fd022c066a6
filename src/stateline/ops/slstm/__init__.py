"""LSTM with exponential gates and heads that do not mix, as in xLSTM."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.containment import contained
from stateline.ops.declared import mixed
from stateline.ops.op import Example, Op, Sizes

START = -1e30
"""Scale m of a state that has read nothing: smaller than any input gate."""


class SLSTMCell(NamedTuple):
    """State of an sLSTM: its last output, and its sums, which are scaled by exp(-m)."""

    h: Float[Tensor, "batch head d_head"]
    c: Float[Tensor, "batch head d_head"]
    n: Float[Tensor, "batch head d_head"]
    m: Float[Tensor, "batch head d_head"]


def empty_cell(like: Tensor, *shape: int) -> SLSTMCell:
    """The state before the first input, in the dtype of a tensor on its device."""
    kind: Any = {"dtype": like.dtype, "device": like.device}
    h, c, n = (torch.zeros(shape, **kind) for _ in "hcn")
    return SLSTMCell(h, c, n, torch.full(shape, START, **kind))


def example(sizes: Sizes) -> Example:
    """Heads as in attention."""
    count, width = sizes.heads
    gates = sizes.signal(4, count, width)
    weight = sizes.weight(count, width, 4, width) / width**0.5
    cell = empty_cell(weight.detach(), sizes.batch, count, width)
    return Example((gates, weight, cell), 8.0 * sizes.positions * width)


OP = Op(__name__, ["numba"], example)


def _fits(gates: Tensor, state: SLSTMCell) -> str:
    """An error in the number of gates or the dtypes of the state, or an empty string."""
    if gates.shape[2] != 4:
        return f"needs four gates, got {gates.shape[2]}"
    kinds = mixed(state)
    return kinds and f"the parts of the state need one dtype, got {kinds}"


@bound(OP, _fits, autocast=False)
@contained()
def slstm(
    gates: Float[Tensor, "batch length gate head d_head"],
    weight: Float[Tensor, "head d_head gate d_head"],
    state: SLSTMCell,
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length head d_head"], SLSTMCell]:
    r"""Run the recurrence over a sequence, or over the next chunk of one.

    .. math::
        (i, f, z, o)_t &= x_t + R\, h_{t-1} \\
        m_t &= \max(\log \sigma(f) + m_{t-1},\; i) \\
        c_t &= \sigma(f)\, e^{m_{t-1} - m_t} c_{t-1} + e^{i - m_t} \tanh(z) \\
        n_t &= \sigma(f)\, e^{m_{t-1} - m_t} n_{t-1} + e^{i - m_t} \\
        h_t &= \sigma(o)\, c_t / n_t

    entry by entry, with a matrix R for each head. The output does not depend on the scale m: it
    keeps the exponentials below one. So m is taken as a constant in the gradients.

    Args:
        gates: x, what the inputs give to the gates i, f, z and o.
        weight: R, from the entries of the output before to the entries of each gate.
        state: State before the first input; all n must be positive, or it is
            :func:`empty_cell`'s.

    Returns:
        All outputs, and the state after the last input.

    References:
        Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024, section 2.2 and
        appendix A.
    """
    return backend(gates, weight, state)
