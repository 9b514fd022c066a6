r"""Circular convolution of N1 N2 points by matrix products (Cooley-Tukey), causal by zero padding.

A signal is a matrix Z with entry :math:`z_{j_1 N_2 + j_2}` in row :math:`j_1`. With the Fourier
matrices F and the twiddle factors W, :math:`((F_1 Z) \odot W) F_2` holds frequency
:math:`k_1 + N_1 k_2` in row :math:`k_1`; the inverse takes the same steps back. Two rows of a batch
are the real and the imaginary part of one signal: a real kernel filters both at once.
"""

import triton
import triton.language as tl

from stateline.ops.triton_kernels.diagonal import load_matrix


@triton.jit
def product(a_re, a_im, b_re, b_im, PRECISION: tl.constexpr):
    """Product of complex matrices."""
    re = tl.dot(a_re, b_re, input_precision=PRECISION)
    re -= tl.dot(a_im, b_im, input_precision=PRECISION)
    im = tl.dot(a_re, b_im, input_precision=PRECISION)
    im += tl.dot(a_im, b_re, input_precision=PRECISION)
    return re, im


@triton.jit
def transform(z_re, z_im, constants, N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr):
    """From signal to spectrum."""
    f_re, f_im = load_matrix(constants, N1, N1), load_matrix(constants + N1 * N1, N1, N1)
    z_re, z_im = product(f_re, f_im, z_re, z_im, PRECISION)
    constants += 2 * N1 * N1
    w_re, w_im = load_matrix(constants, N1, N2), load_matrix(constants + N1 * N2, N1, N2)
    z_re, z_im = z_re * w_re - z_im * w_im, z_re * w_im + z_im * w_re
    constants += 2 * N1 * N2
    f_re, f_im = load_matrix(constants, N2, N2), load_matrix(constants + N2 * N2, N2, N2)
    return product(z_re, z_im, f_re, f_im, PRECISION)


@triton.jit
def invert(z_re, z_im, constants, N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr):
    """From spectrum to signal, times N1 N2."""
    second = constants + 2 * N1 * (N1 + N2)
    f_re, f_im = load_matrix(second, N2, N2), load_matrix(second + N2 * N2, N2, N2)
    z_re, z_im = product(z_re, z_im, f_re, -f_im, PRECISION)
    twiddle = constants + 2 * N1 * N1
    w_re, w_im = load_matrix(twiddle, N1, N2), load_matrix(twiddle + N1 * N2, N1, N2)
    z_re, z_im = z_re * w_re + z_im * w_im, z_im * w_re - z_re * w_im
    f_re, f_im = load_matrix(constants, N1, N1), load_matrix(constants + N1 * N1, N1, N1)
    return product(f_re, -f_im, z_re, z_im, PRECISION)


@triton.jit
def load_signal(base, length, left, N1: tl.constexpr, N2: tl.constexpr):
    """A row of the batch as a matrix; zeros beyond its length, or if no rows are left."""
    at = tl.arange(0, N1)[:, None] * N2 + tl.arange(0, N2)[None, :]
    inside = (at < length) & (at * 0 < left)
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def convolve(
    u, spectrum, constants, y, rows, length, channels, outputs, row_stride, channel_stride,
    CONJUGATE: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two rows of one output; with CONJUGATE, correlate them: u then has a channel per output."""
    output, first = tl.program_id(0).to(tl.int64), 2 * tl.program_id(1).to(tl.int64)
    u += first * row_stride + output % channels * channel_stride
    z_re = load_signal(u, length, rows - first, N1, N2)
    z_im = load_signal(u + row_stride, length, rows - first - 1, N1, N2)
    z_re, z_im = transform(z_re, z_im, constants, N1, N2, PRECISION)
    spectrum += output * 2 * N1 * N2
    k_re, k_im = load_matrix(spectrum, N1, N2), load_matrix(spectrum + N1 * N2, N1, N2)
    if CONJUGATE:
        k_im = -k_im
    z_re, z_im = z_re * k_re - z_im * k_im, z_re * k_im + z_im * k_re
    z_re, z_im = invert(z_re, z_im, constants, N1, N2, PRECISION)
    at = tl.arange(0, N1)[:, None] * N2 + tl.arange(0, N2)[None, :]
    y += (first * outputs + output) * length
    tl.store(y + at, z_re, mask=at < length)
    tl.store(y + outputs * length + at, z_im, mask=(at < length) & (at * 0 < rows - first - 1))


@triton.jit
def correlate(
    u, dy, constants, dkernel, rows, length, taps, scale, channels, outputs,
    row_stride, channel_stride,
    N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one kernel, summed over the batch.

    With two rows as one complex signal, the real part of the correlation is the sum of both.
    """
    output = tl.program_id(0).to(tl.int64)
    u += output % channels * channel_stride
    s_re, s_im = tl.zeros((N1, N2), tl.float32), tl.zeros((N1, N2), tl.float32)
    for first in range(0, rows, 2):
        pair, line = u + first * row_stride, dy + (first * outputs + output) * length
        z_re = load_signal(pair, length, rows - first, N1, N2)
        z_im = load_signal(pair + row_stride, length, rows - first - 1, N1, N2)
        g_re = load_signal(line, length, rows - first, N1, N2)
        g_im = load_signal(line + outputs * length, length, rows - first - 1, N1, N2)
        z_re, z_im = transform(z_re, z_im, constants, N1, N2, PRECISION)
        g_re, g_im = transform(g_re, g_im, constants, N1, N2, PRECISION)
        s_re += z_re * g_re + z_im * g_im
        s_im += z_re * g_im - z_im * g_re
    s_re, s_im = invert(s_re, s_im, constants, N1, N2, PRECISION)
    at = tl.arange(0, N1)[:, None] * N2 + tl.arange(0, N2)[None, :]
    tl.store(dkernel + output * taps + at, s_re * scale, mask=at < taps)
