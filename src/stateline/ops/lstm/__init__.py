"""One layer of LSTM (long short-term memory)."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.containment import contained
from stateline.ops.declared import mixed
from stateline.ops.op import Example, Op, Sizes


class LSTMWeights(NamedTuple):
    """Weights of an LSTM; the rows of the gates are in the order i, f, g, o.

    Attributes:
        w_ih: W, from the input.
        w_hh: U, from the output before.
        b_ih: b.
        b_hh: b'; redundant, but PyTorch's weights have it.
    """

    w_ih: Float[Tensor, "gates d_in"]
    w_hh: Float[Tensor, "gates d_hidden"]
    b_ih: Float[Tensor, " gates"]
    b_hh: Float[Tensor, " gates"]


class LSTMCell(NamedTuple):
    """State of an LSTM: its last output and its cell."""

    h: Float[Tensor, "batch d_hidden"]
    c: Float[Tensor, "batch d_hidden"]


def example(sizes: Sizes) -> Example:
    """As many hidden units as inputs."""
    width = sizes.d_model
    x = sizes.weight(sizes.batch, sizes.length, width)  # it computes in the dtype of its weights
    weights = LSTMWeights(
        *(sizes.weight(4 * width, width) / width**0.5 for _ in range(2)),
        *(sizes.weight(4 * width) for _ in range(2)),
    )
    cell = LSTMCell(*(sizes.weight(sizes.batch, width) for _ in range(2)))
    return Example((x, weights, cell), 16.0 * sizes.positions * width)


OP = Op(__name__, [], example)


def _sizes_fit(x: Tensor, weights: LSTMWeights, state: LSTMCell) -> str:
    """An error in sizes and dtypes, or an empty string."""
    gates, hidden = weights.w_hh.shape
    if gates != 4 * hidden or not hidden:
        return f"weights.w_hh needs four gates for each of d_hidden >= 1 units, got {gates, hidden}"
    kinds = mixed(x, weights, state)
    return kinds and f"needs all tensors of one dtype, got {kinds}"


@bound(OP, _sizes_fit, autocast=False)
@contained()
def lstm(
    x: Float[Tensor, "batch length d_in"],
    weights: LSTMWeights,
    state: LSTMCell,
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length d_hidden"], LSTMCell]:
    r"""Run the recurrence over a sequence, or over the next chunk of one.

    .. math::
        i, f, g, o &= W x_t + b + U h_{t-1} + b' \\
        c_t &= \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g) \\
        h_t &= \sigma(o) \odot \tanh(c_t)

    Args:
        x: Inputs.
        weights: Matrices W and U, and biases b and b'.
        state: Output h and cell c before the first input.

    Returns:
        All outputs h, and the state after the last input.

    References:
        Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 1997; forget gate:
        Gers et al., "Learning to Forget", Neural Computation 2000.
    """
    return backend(x, weights, state)
