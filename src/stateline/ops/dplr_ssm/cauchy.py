r"""Diagonal-plus-low-rank state space model by the generating function of its kernel, as in S4.

At each root of unity :math:`\omega`, with :math:`q = 1 - \omega` and
:math:`h = \frac{dt}{2} (1 + \omega)`,

.. math::
    \hat k(\omega) = \sum_{l < L} k_l \omega^l
    = \mathrm{dt}\, \tilde C (q - h A)^{-1} B, \qquad \tilde C = C (I - \bar A^L)

and the Woodbury identity leaves four sums of the form :math:`\sum_n x_n y_n / (q - h \Lambda_n)`
(a Cauchy product). This backend exists for comparison, it is slower than ``torch``: on a CPU core,
forward and backward of 64 channels with states of size 64 take 0.57 s for 1,024 inputs and 12.7 s
for 16,384, against 0.18 s and 0.33 s. Both are exact.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.dplr_ssm import DPLRWeights, pytorch
from stateline.ops.dplr_ssm.pytorch import convolve, precise, rows, transition


def dplr_ssm(u: Tensor, weights: DPLRWeights, state: Tensor | None) -> tuple[Tensor, Any]:
    """Convolve with the impulse response; from a state, see the backend ``torch``."""
    if state is not None:
        return pytorch.dplr_ssm(u, weights, state)
    length = u.shape[-2]
    dt, a, p, b, c = map(precise, weights)
    if not length:
        return u.new_zeros(*u.shape[:-1], len(c)), None
    # Differs from the paper, which divides by 1 + omega and gets 0/0 at omega = -1. Here no
    # denominator vanishes, because Re Lambda < 0 and q and h are not both zero.
    half = torch.arange(length // 2 + 1, dtype=dt.dtype, device=dt.device)
    omega = torch.polar(torch.ones_like(half), -2 * math.pi / length * half)
    h = (1 + omega) * dt[:, None] / 2  # (channel, node)
    resolvents = [
        1 / (1 - omega - h[:, None] * values[..., None])  # (channel, mode, node)
        for values in (_complex(a), _complex(a).conj())
    ]

    def product(x: Tensor, y: Tensor) -> Tensor:
        """Cauchy product over both halves of the modes."""
        upper, lower = resolvents
        weights = (x * y)[..., None, :]
        return (weights @ upper + weights.conj() @ lower)[..., 0, :]

    p_c, b_c, c_c = _complex(p), _complex(b), _truncated(dt, a, p, c, length)
    through = product(c_c, p_c) * product(p_c.conj(), b_c) / (1 + h * product(p_c.conj(), p_c))
    spectrum = dt[:, None] * (product(c_c, b_c) - h * through)
    return convolve(u, torch.fft.irfft(spectrum, n=length)), None


def _truncated(
    dt: Float[Tensor, " channel"],
    a: Float[Tensor, "channel mode 2"],
    p: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    length: int,
) -> Tensor:
    """The readouts C (I - A^L) as complex (readout, channel, mode): kernels end after L taps."""
    power, readout = transition(dt, a, p), rows(c, len(dt))[..., None] / 2
    decayed = readout
    for bit in range(length.bit_length()):
        decayed = power @ decayed if length >> bit & 1 else decayed
        power = power @ power
    left = (readout - decayed)[..., 0].unflatten(-1, (-1, 2))
    return torch.complex(left[..., 0], -left[..., 1])


def _complex(planes: Float[Tensor, "*shape 2"]) -> Tensor:
    """Planes as a complex tensor; a copy, because a float64 view needs 16-byte alignment."""
    return torch.complex(planes[..., 0], planes[..., 1])
