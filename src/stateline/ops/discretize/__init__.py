r"""Discretise the diagonal state space models of all channels.

With :math:`z = \mathrm{dt}\, A`, the results are :math:`\log \bar A` and
:math:`\bar B = \mathrm{dt}\, g B`. Zero-order hold (``zoh``) has :math:`\log \bar A = z` and
:math:`g = (e^z - 1) / z`; the bilinear rule has
:math:`\bar A = (1 + z/2) / (1 - z/2)` and :math:`g = 1 / (1 - z/2)`.

Complex numbers are real planes (a last axis of length 2).
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.discretization import Discretization
from stateline.ops.discretize import pytorch, reference
from stateline.ops.dispatch import dispatch
from stateline.ops.op import Op

OP = Op(
    "discretize",
    {
        "numba": "stateline.ops.discretize.numba_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def discretize(
    log_dt: Float[Tensor, " channel"],
    decay: Float[Tensor, "copies mode"],
    frequency: Float[Tensor, "copies mode"],
    b: Float[Tensor, "copies mode 2"],
    rule: Discretization,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "channel mode 2"], Float[Tensor, "channel mode 2"]]:
    """Logarithm of the transition, and input vector, of each channel.

    Args:
        log_dt: Logarithm of the step of each channel.
        decay: -Re A; channel i uses row ``i % copies``.
        frequency: Im A.
        b: Input vector B.
        rule: ``zoh`` or ``bilinear``.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Both for each channel.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> log_a, b = discretize(torch.zeros(1), one, 0 * one, torch.ones(1, 1, 2), "zoh")
        >>> log_a.flatten().tolist(), b.flatten().mul(100).round().tolist()
        ([-1.0, 0.0], [63.0, 63.0])
    """
    return dispatch(OP, "discretize", log_dt, decay, frequency, b, rule, backend=backend)
