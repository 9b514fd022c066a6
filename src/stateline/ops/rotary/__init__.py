r"""Rotation of pairs of entries by given angles: the core of rotary position embeddings."""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch
from stateline.ops.op import Op
from stateline.ops.rotary import pytorch, reference

OP = Op(
    "rotary",
    {"numba": "stateline.ops.rotary.numba_backend", "torch": pytorch, "reference": reference},
)


def rotary(
    x: Float[Tensor, "batch length head d_head"],
    cos: Float[Tensor, "rows length pair"],
    sin: Float[Tensor, "rows length pair"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    """Rotate entries t and t + pair of each head, for t < pair; the others stay as they are.

    Args:
        x: Queries or keys.
        cos: Cosine of the angle of each pair, in float32 or better; one row serves all rows of
            ``x``. No gradient reaches it.
        sin: Sine of the angle.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        The rotated tensor, in the dtype of ``x``.

    Example:
        A quarter turn.

        >>> import torch
        >>> x, zero = torch.tensor([1.0, 2.0, 5.0]).reshape(1, 1, 1, 3), torch.zeros(1, 1, 1)
        >>> rotary(x, zero, zero + 1).flatten()
        tensor([-2.,  1.,  5.])
    """
    return dispatch(OP, "rotary", x, cos, sin, backend=backend)
