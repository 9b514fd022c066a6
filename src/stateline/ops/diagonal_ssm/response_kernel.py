r"""Impulse response of a diagonal SSM in float64: :math:`2\,\mathrm{Re} \sum_n c_n b_n a_n^t`.

Its gradients are those of polynomials in a, by Horner's rule.
"""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.jit import summing_kernel

LEAST = 1e-30
"""Smaller outputs are zero: a processor takes many times as long for numbers below 1e-38."""


@summing_kernel
def _turn(pr, pi, ar, ai):
    """Multiply p by a, and return the sum of the real parts of p before that."""
    total = 0.0
    for n in range(len(ar)):
        real, imag = pr[n], pi[n]
        total += real
        pr[n] = real * ar[n] - imag * ai[n]
        pi[n] = real * ai[n] + imag * ar[n]
    return total


@summing_kernel
def forward(a, b, c, y, start, stop):
    """Channels ``start`` to ``stop`` of y (channel, time); a is (2, #channel, mode)."""
    modes = b.shape[1]
    pr, pi = np.empty(modes), np.empty(modes)
    for channel in range(start, stop):
        k = channel % a.shape[1]
        for n in range(modes):
            w = 2 * complex(b[channel, n, 0], b[channel, n, 1])
            w *= complex(c[channel, n, 0], c[channel, n, 1])
            pr[n], pi[n] = w.real, w.imag
        for t in range(y.shape[1]):
            total = _turn(pr, pi, a[0, k], a[1, k])
            y[channel, t] = total if abs(total) > LEAST else 0


@summing_kernel
def _append(s, d, ar, ai, g):
    """Horner's rule: d = d a + s for the derivative, s = s a + g for the value."""
    sr, si, dr, di = s[0], s[1], d[0], d[1]
    for n in range(len(ar)):
        x, y, u, v = sr[n], si[n], dr[n], di[n]
        dr[n] = u * ar[n] - v * ai[n] + x
        di[n] = u * ai[n] + v * ar[n] + y
        sr[n] = x * ar[n] - y * ai[n] + g
        si[n] = x * ai[n] + y * ar[n]


@summing_kernel
def backward(grad, a, b, c, dlog_a, db, dc, start, stop):
    """Gradients for channels ``start`` to ``stop``; dlog_a has an entry for each of them."""
    modes = b.shape[1]
    s, d = np.empty((2, modes)), np.empty((2, modes))
    for channel in range(start, stop):
        k = channel % a.shape[1]
        s[:] = 0
        d[:] = 0
        for t in range(grad.shape[1] - 1, -1, -1):
            _append(s, d, a[0, k], a[1, k], np.float64(grad[channel, t]))
        for n in range(modes):
            bn = complex(b[channel, n, 0], b[channel, n, 1])
            cn = complex(c[channel, n, 0], c[channel, n, 1])
            value = 2 * complex(s[0, n], s[1, n])
            slope = 2 * bn * cn * complex(a[0, k, n], a[1, k, n]) * complex(d[0, n], d[1, n])
            dlog_a[channel, n, 0], dlog_a[channel, n, 1] = slope.real, -slope.imag
            db[channel, n, 0], db[channel, n, 1] = (value * cn).real, -(value * cn).imag
            dc[channel, n, 0], dc[channel, n, 1] = (value * bn).real, -(value * bn).imag
