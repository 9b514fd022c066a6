r"""The filter of a shift state space model: correlation of its input and output vectors.

.. math:: k_l = \sum_n b_n c_{n+l} + D\, \delta_l
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch
from stateline.ops.op import Op
from stateline.ops.shift_taps import pytorch, reference

OP = Op(
    "shift_taps",
    {
        "numba": "stateline.ops.shift_taps.numba_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def shift_taps(
    b: Float[Tensor, "channel taps"],
    c: Float[Tensor, "channel taps"],
    skip: Float[Tensor, " channel"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "channel taps"]:
    """Taps of the filter of each channel.

    Args:
        b: Input vectors.
        c: Output vectors.
        skip: Skip connection D, part of the first tap.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        As many taps as ``b`` and ``c`` have entries.

    Example:
        >>> import torch
        >>> b, c = torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0, 3.0]])
        >>> shift_taps(b, c, torch.tensor([100.0])).round()
        tensor([[132.,   3.]])
    """
    return dispatch(OP, "shift_taps", b, c, skip, backend=backend)
