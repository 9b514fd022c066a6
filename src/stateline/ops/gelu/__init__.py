r"""The nonlinearity GELU in its tanh approximation, as in GPT-2 and H3.

.. math:: y = \tfrac12\, x\, (1 + \tanh u) = x\, \sigma(2u), \qquad
    u = \sqrt{2/\pi}\, (x + 0.044715\, x^3)

References:
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch
from stateline.ops.gelu import pytorch, reference
from stateline.ops.op import Op

OP = Op(
    "gelu",
    {"numba": "stateline.ops.gelu.numba_backend", "torch": pytorch, "reference": reference},
)


def gelu(x: Float[Tensor, "*shape"], *, backend: str = "auto") -> Float[Tensor, "*shape"]:
    """Apply GELU to every entry.

    Args:
        x: Any tensor of floats.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        A tensor of the same shape and dtype.

    Example:
        >>> import torch
        >>> gelu(torch.tensor([-100.0, 0.0, 1.0, 100.0]))
        tensor([ -0.0000,   0.0000,   0.8412, 100.0000])
    """
    return dispatch(OP, "gelu", x, backend=backend)
