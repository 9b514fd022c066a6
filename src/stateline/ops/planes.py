"""Complex numbers as two real planes: a last axis of length 2 holds the real and imaginary part."""

import torch
from jaxtyping import Float
from torch import Tensor

Planes = Float[Tensor, "*shape 2"]


def precise(x: Tensor) -> Tensor:
    """Convert to float64 if the device supports it."""
    return x if x.device.type == "mps" else x.double()  # mps has no float64


def powers_of(log: Planes, exponents: Tensor) -> Float[Tensor, "*shape power 2"]:
    """Powers of complex numbers with these logarithms, in float64 where possible."""
    return exponential(precise(log)[..., None, :] * exponents[:, None])


def multiply(a: Float[Tensor, "*a 2"], b: Float[Tensor, "*b 2"]) -> Float[Tensor, "*ab 2"]:
    """Product of complex numbers (leading axes broadcast).

    Example:
        >>> multiply(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
        tensor([-1.,  0.])
    """
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    imag = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    return torch.stack([real, imag], dim=-1)


def conjugate(z: Planes) -> Planes:
    """Complex conjugates."""
    return torch.stack([z[..., 0], -z[..., 1]], dim=-1)


def divide(a: Float[Tensor, "*a 2"], b: Float[Tensor, "*b 2"]) -> Float[Tensor, "*ab 2"]:
    """Quotient of complex numbers (leading axes broadcast)."""
    return multiply(a, conjugate(b)) / b.square().sum(dim=-1, keepdim=True)


def real_rows(c: Float[Tensor, "*shape mode 2"]) -> Float[Tensor, "*shape two_modes"]:
    """Output vectors as rows of real numbers: their product with a state is ``2 Re c x``."""
    return 2 * conjugate(c).flatten(-2)


def exponential(log: Planes) -> Planes:
    """Exponential function of complex numbers."""
    magnitude, angle = log[..., 0].exp(), log[..., 1]
    return torch.stack([magnitude * angle.cos(), magnitude * angle.sin()], dim=-1)


def exponential_minus_one(log: Planes) -> Planes:
    r""":math:`e^z - 1`, accurate for small z.

    Example:
        >>> exponential_minus_one(torch.tensor([1e-9, 0.0]))
        tensor([1.0000e-09, 0.0000e+00])
    """
    real, imag = log.unbind(dim=-1)
    magnitude = real.exp()
    turned = 2 * (imag / 2).sin().square()  # 1 - cos
    return torch.stack([real.expm1() - magnitude * turned, magnitude * imag.sin()], dim=-1)
