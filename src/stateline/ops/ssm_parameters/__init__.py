"""Weights of state space models from their parameters."""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.discretization import Discretization
from stateline.ops.op import Example, Op, Sizes


def example(sizes: Sizes, modes: int = 32) -> Example:
    """Discretise the modes of all channels."""
    log_dt = sizes.weight(sizes.d_model) - 4
    decay, frequency = (sizes.weight(sizes.d_model, modes).abs() for _ in range(2))
    inputs = log_dt, decay, frequency, sizes.weight(sizes.d_model, modes, 2), "zoh"
    return Example(inputs, sizes.d_model * modes * 40.0, "discretize")


OP = Op(__name__, ["numba"], example)


@bound(OP)
def shift_taps(
    b: Float[Tensor, "channel taps"],
    c: Float[Tensor, "channel taps"],
    skip: Float[Tensor, " channel"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "channel taps"]:
    r"""Filter of a shift state space model: the correlation of its input and output vectors.

    .. math:: k_l = \sum_n b_n c_{n+l} + D\, \delta_l

    Args:
        b: Input vectors.
        c: Output vectors.
        skip: Skip connection D, part of the first tap.

    Returns:
        As many taps as ``b`` and ``c`` have entries.

    Example:
        >>> import torch
        >>> b, c = torch.tensor([[1.0, 10.0]]), torch.tensor([[2.0, 3.0]])
        >>> shift_taps(b, c, torch.tensor([100.0])).round()
        tensor([[132.,   3.]])

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2.
    """
    return backend(b, c, skip)


def _copies_divide(log_dt: Tensor, decay: Tensor) -> str:
    channels, copies = len(log_dt), len(decay)
    if not copies or channels % copies:
        return f"the {copies} rows of decay must divide the {channels} channels of log_dt"
    return ""


@bound(OP, _copies_divide)
def discretize(
    log_dt: Float[Tensor, " channel"],
    decay: Float[Tensor, "copies mode"],
    frequency: Float[Tensor, "copies mode"],
    b: Float[Tensor, "copies mode 2"],
    rule: Discretization,
    *,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "channel mode 2"], Float[Tensor, "channel mode 2"]]:
    r"""Discretise the diagonal state space models of all channels.

    With :math:`z = \mathrm{dt}\, A`, the results are :math:`\log \bar A` and
    :math:`\bar B = \mathrm{dt}\, g B`. Zero-order hold (``zoh``) has :math:`\log \bar A = z` and
    :math:`g = (e^z - 1) / z`; the bilinear rule has
    :math:`\bar A = (1 + z/2) / (1 - z/2)` and :math:`g = 1 / (1 - z/2)`.
    Complex numbers are real planes (a last axis of length 2).

    Args:
        log_dt: Logarithm of the step of each channel.
        decay: -Re A; channel i uses row ``i % copies``.
        frequency: Im A.
        b: Input vector B.
        rule: ``zoh`` or ``bilinear``.

    Returns:
        Logarithm of the transition, and input vector, of each channel.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> log_a, b = discretize(torch.zeros(1), one, 0 * one, torch.ones(1, 1, 2), "zoh")
        >>> log_a.flatten().tolist(), b.flatten().mul(100).round().tolist()
        ([-1.0, 0.0], [63.0, 63.0])

    References:
        Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
        NeurIPS 2022.
    """
    return backend(log_dt, decay, frequency, b, rule)
