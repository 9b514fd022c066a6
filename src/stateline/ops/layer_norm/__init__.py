r"""Layer normalisation of vectors.

.. math:: y = w \odot (x - \mu) / \sqrt{\sigma^2 + \epsilon} + b

with the mean and the variance of the entries of each vector.

References:
    Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import dispatch
from stateline.ops.layer_norm import pytorch, reference
from stateline.ops.op import Op

OP = Op(
    "layer_norm",
    {
        "numba": "stateline.ops.layer_norm.numba_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def layer_norm(
    x: Float[Tensor, "*batch width"],
    weight: Float[Tensor, " width"],
    bias: Float[Tensor, " width"],
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch width"]:
    r"""Normalise each vector.

    Args:
        x: Vectors.
        weight: Factor of each entry.
        bias: What is added to each entry.
        eps: :math:`\epsilon`, added to the variance.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Vectors of the same shape.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([3.0, 5.0]), torch.ones(2), torch.zeros(2), eps=0.0)
        tensor([-1.,  1.])
    """
    return dispatch(OP, "layer_norm", x, weight, bias, eps, backend=backend)
