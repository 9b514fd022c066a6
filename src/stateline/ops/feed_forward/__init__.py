r"""Feed-forward with GELU: the same two-layer network at every position.

.. math:: y = W_2\, \mathrm{gelu}(W_1 x + b_1) + b_2

GELU is its tanh approximation, see :func:`stateline.ops.gelu`.

References:
    Vaswani et al., 2017, section 3.3; Hendrycks and Gimpel, 2016.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch
from stateline.ops.feed_forward import pytorch, reference
from stateline.ops.op import Op

OP = Op(
    "feed_forward",
    {
        "numba": "stateline.ops.feed_forward.numba_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def feed_forward(
    x: Float[Tensor, "*batch d_in"],
    w_in: Float[Tensor, "hidden d_in"],
    b_in: Float[Tensor, " hidden"],
    w_out: Float[Tensor, "d_out hidden"],
    b_out: Float[Tensor, " d_out"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch d_out"]:
    """Map each position.

    Args:
        x: Inputs.
        w_in: First matrix.
        b_in: Its bias.
        w_out: Second matrix.
        b_out: Its bias.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``x``; under autocast, in that of matrix products.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> feed_forward(one, one, torch.zeros(1), 2 * one, torch.ones(1))
        tensor([[2.6824]])
    """
    return dispatch(OP, "feed_forward", x, w_in, b_in, w_out, b_out, backend=backend)
