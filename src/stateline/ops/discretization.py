r"""Discretise a diagonal differential equation to :math:`x_t = \bar A x_{t-1} + \bar B u_t`.

A rule maps :math:`z = \mathrm{dt}\, A` to :math:`\log \bar A` and a gain g, where
:math:`\bar B = \mathrm{dt}\, g B`. Complex numbers are real planes (a last axis of length 2).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from stateline.ops.planes import Planes, divide, exponential_minus_one

Discretization = Literal["zoh", "bilinear"]

_SMALL = 1e-8
"""Where z is smaller, the gain is 1 + z/2 to all digits, and z squared may be zero."""


def zero_order_hold(z: Planes) -> tuple[Planes, Planes]:
    r"""Exact if the input is constant during each step: :math:`z` and :math:`(e^z - 1)/z`.

    Example:
        >>> zero_order_hold(torch.tensor([-0.01, 0.0]))[1]
        tensor([0.9950, 0.0000])
    """
    real, imag = z.unbind(dim=-1)
    near = torch.stack([1 + real / 2, imag / 2], dim=-1)
    small = z.abs().amax(dim=-1, keepdim=True) < _SMALL
    far = torch.where(small, 1.0, z)
    return z, torch.where(small, near, divide(exponential_minus_one(far), far))


def bilinear(z: Planes) -> tuple[Planes, Planes]:
    r"""Trapezoidal rule: the logarithm of :math:`(1 + z/2)/(1 - z/2)`, and :math:`1/(1 - z/2)`."""
    real, imag = z.unbind(dim=-1)
    # avoids cancellation for small z, and branch cuts
    denominator = (1 - real / 2).square() + imag.square() / 4
    log_magnitude = 0.5 * torch.log1p(2 * real / denominator)
    angle = torch.atan2(imag, 1 - (real.square() + imag.square()) / 4)
    gain = torch.stack([1 - real / 2, imag / 2], dim=-1) / denominator[..., None]
    return torch.stack([log_magnitude, angle], dim=-1), gain


DISCRETIZATIONS: Mapping[Discretization, Callable[[Planes], tuple[Planes, Planes]]] = {
    "zoh": zero_order_hold,
    "bilinear": bilinear,
}
