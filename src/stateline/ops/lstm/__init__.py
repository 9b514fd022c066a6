"""One layer of LSTM (long short-term memory)."""

from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.lstm import pytorch, reference
from stateline.ops.op import Op

OP = Op("lstm", {"torch": pytorch, "reference": reference})


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
        w_ih: W: the rows of i, then those of f, g and o.
        w_hh: U.
        b_ih: b.
        b_hh: b'; redundant, but PyTorch's weights have it.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        All outputs, the last output, the last cell.

    Raises:
        InputError: If the shapes do not fit each other.
    """
    _check(x, h, c, w_ih, w_hh, b_ih, b_hh)
    return dispatch(OP, "lstm", x, h, c, w_ih, w_hh, b_ih, b_hh, backend=backend)


def _check(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> None:
    """Check all shapes: PyTorch's kernel does not, and would access memory out of bounds."""
    batch, d_in, d_hidden = len(x), x.shape[-1], h.shape[-1]
    gates = 4 * d_hidden
    names = ("x", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh")
    found = [tuple(t.shape) for t in (x, h, c, w_ih, w_hh, b_ih, b_hh)]
    wanted = [
        (batch, *x.shape[1:2], d_in),
        *((batch, d_hidden),) * 2,
        (gates, d_in),
        (gates, d_hidden),
        *((gates,),) * 2,
    ]
    for name, shape, right in zip(names, found, wanted, strict=True):
        if shape != right:
            shapes = ", ".join(f"{n} {s}" for n, s in zip(names, found, strict=True))
            raise InputError(f"lstm needs {name} of shape {right}, got {shapes}")
