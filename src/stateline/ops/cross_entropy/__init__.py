r"""Cross entropy of logits and the wanted classes, summed over all rows that have one.

.. math:: \ell = \sum_{r:\, t_r \ge 0} \Bigl( \log \sum_j e^{x_{rj}} - x_{r t_r} \Bigr)

In nats.
"""

from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.cross_entropy import pytorch, reference
from stateline.ops.dispatch import dispatch
from stateline.ops.op import Op

OP = Op(
    "cross_entropy",
    {
        "numba": "stateline.ops.cross_entropy.numba_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def cross_entropy(
    logits: Float[Tensor, "row classes"], targets: Int[Tensor, " row"], *, backend: str = "auto"
) -> Float[Tensor, ""]:
    """Sum over the rows.

    Args:
        logits: Logarithms of the chances of each class, up to a constant per row.
        targets: Class of each row; negative where there is none.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        The sum, in the dtype of the logits.

    Example:
        >>> import torch
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """
    return dispatch(OP, "cross_entropy", logits, targets, backend=backend)
