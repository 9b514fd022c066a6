"""One layer of long short-term memory."""

from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.backend import choose, own_precision
from stateline.ops.lstm import pytorch, reference

BACKENDS = {"torch": pytorch, "reference": reference}


@own_precision
def lstm(
    x: Float[Tensor, "batch length d_in"],
    h: Float[Tensor, "batch d_hidden"],
    c: Float[Tensor, "batch d_hidden"],
    w_ih: Float[Tensor, "gates d_in"],
    w_hh: Float[Tensor, "gates d_hidden"],
    b_ih: Float[Tensor, " gates"],
    b_hh: Float[Tensor, " gates"],
    *,
    backend: str = "auto",
) -> tuple[
    Float[Tensor, "batch length d_hidden"],
    Float[Tensor, "batch d_hidden"],
    Float[Tensor, "batch d_hidden"],
]:
    r"""Run the recurrence over a sequence.

    .. math::
        i, f, g, o &= W x_t + b + U h_{t-1} + b' \\
        c_t &= \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g) \\
        h_t &= \sigma(o) \odot \tanh(c_t)

    Args:
        x: Inputs.
        h: Output before the first input.
        c: Cell before the first input.
        w_ih: W, with the rows of i, f, g, o one below the other.
        w_hh: U.
        b_ih: b.
        b_hh: b'; redundant, kept so that PyTorch's weights load.
        backend: Implementation, by default the fastest.

    Returns:
        All outputs, the last output, the last cell.

    Raises:
        InputError: If the inputs are not as wide as the rows of W.
    """
    if x.shape[-1] != w_ih.shape[-1]:  # PyTorch's kernel does not look, and reads what lies beside
        raise InputError(f"the inputs must be {w_ih.shape[-1]} wide, got {tuple(x.shape)}")
    return choose("lstm", BACKENDS, backend).lstm(x, h, c, w_ih, w_hh, b_ih, b_hh)
