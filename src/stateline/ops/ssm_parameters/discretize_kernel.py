r"""Discretisation of diagonal state space models: values and gradients, mode by mode, in float64.

With :math:`z = \mathrm{dt}\, A`, each rule has a logarithm l(z) and a gain g(z), which are
holomorphic: the gradient of z is the gradient of the result times the conjugate derivative.
"""

# mypy: ignore-errors

import math

from stateline.ops.numba_common.jit import kernel

SMALL = 1e-5
"""Below this modulus of z, the derivative of (exp(z) - 1) / z is taken from its series."""


@kernel
def _exp_minus_one(z):
    """exp(z) - 1 without cancellation for small z."""
    size, turned = math.exp(z.real), math.sin(z.imag / 2)
    real = math.expm1(z.real) - 2 * size * turned * turned
    return complex(real, size * math.sin(z.imag))


@kernel
def _logarithm(z, zoh):
    """Logarithm of the transition; no cancellation for small z, and no branch cut."""
    if zoh:
        return z
    square = z.real * z.real + z.imag * z.imag
    below = (1 - z.real / 2) ** 2 + z.imag * z.imag / 4
    return complex(0.5 * math.log1p(2 * z.real / below), math.atan2(z.imag, 1 - square / 4))


@kernel
def _gain(z, zoh):
    if not zoh:
        return 1 / (1 - z / 2)
    return _exp_minus_one(z) / z if z != 0 else complex(1.0, 0.0)


@kernel
def _slopes(z, gain, zoh):
    """Derivatives of the logarithm and of the gain."""
    if not zoh:
        return 1 / ((1 + z / 2) * (1 - z / 2)), gain * gain / 2
    if abs(z) < SMALL:
        return complex(1.0, 0.0), 0.5 + z / 3
    return complex(1.0, 0.0), (_exp_minus_one(z) + 1 - gain) / z


@kernel
def forward(log_dt, decay, frequency, b, log_a, b_bar, zoh):
    """Fill ``log_a`` and ``b_bar`` (channel, mode, 2)."""
    copies, modes = decay.shape
    for channel in range(log_dt.size):
        dt, k = math.exp(log_dt[channel]), channel % copies
        for n in range(modes):
            z = dt * complex(-decay[k, n], frequency[k, n])
            log = _logarithm(z, zoh)
            vector = dt * _gain(z, zoh) * complex(b[k, n, 0], b[k, n, 1])
            log_a[channel, n, 0], log_a[channel, n, 1] = log.real, log.imag
            b_bar[channel, n, 0], b_bar[channel, n, 1] = vector.real, vector.imag


@kernel
def backward(grad_a, grad_b, log_dt, decay, frequency, b, dlog_dt, ddecay, dfrequency, db, zoh):
    """Add to the gradients of the parameters."""
    copies, modes = decay.shape
    for channel in range(log_dt.size):
        dt, k, total = math.exp(log_dt[channel]), channel % copies, 0.0
        for n in range(modes):
            a, vector = complex(-decay[k, n], frequency[k, n]), complex(b[k, n, 0], b[k, n, 1])
            z = dt * a
            gain = _gain(z, zoh)
            slope, curve = _slopes(z, gain, zoh)
            above = complex(grad_b[channel, n, 0], grad_b[channel, n, 1])
            of_z = complex(grad_a[channel, n, 0], grad_a[channel, n, 1]) * slope.conjugate()
            of_z += above * (dt * vector * curve).conjugate()
            of_b = above * (dt * gain).conjugate()
            total += (above * (gain * vector).conjugate()).real + (of_z * a.conjugate()).real
            ddecay[k, n] -= dt * of_z.real
            dfrequency[k, n] += dt * of_z.imag
            db[k, n, 0] += of_b.real
            db[k, n, 1] += of_b.imag
        dlog_dt[channel] = dt * total
