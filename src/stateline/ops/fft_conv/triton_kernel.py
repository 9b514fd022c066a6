r"""Circular convolution of N1 N2 points by matrix products (Cooley-Tukey), causal by zero padding.

A signal is a matrix Z with entry :math:`z_{j_1 N_2 + j_2}` in row :math:`j_1`. With the Fourier
matrices F and the twiddle factors W, :math:`((F_1 Z) \odot W) F_2` holds frequency
:math:`k_1 + N_1 k_2` in row :math:`k_1`; the inverse takes the same steps back. Two rows of a batch
are the real and the imaginary part of one signal: a real kernel filters both at once.

A signal too long for the memory of a multiprocessor gets one more level: ``spread`` makes N1 lines
of M points each, whose spectra are products of M = N2 N3 points as above, and ``gather`` takes the
lines back. Frequency :math:`k_1 + N_1 k` is entry k of line :math:`k_1`. The real and the imaginary
part of a line lie like two rows of a batch.
"""

import triton
import triton.language as tl

from stateline.ops.diagonal_ssm.triton_kernel import load_matrix


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
def times(z_re, z_im, k, imaginary, CONJUGATE: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """The product with a spectrum, whose imaginary part begins ``imaginary`` entries later."""
    k_re, k_im = load_matrix(k, N1, N2), load_matrix(k + imaginary, N1, N2)
    if CONJUGATE:
        k_im = -k_im
    return z_re * k_re - z_im * k_im, z_re * k_im + z_im * k_re


@triton.jit
def convolve(
    u, spectrum, constants, y, rows, length, channels, outputs, row_stride, channel_stride,
    CONJUGATE: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A line of two rows of one output; with CONJUGATE, correlate: u then has a channel per output.

    The programs along axis 1 are the lines of a signal, of ``length`` each.
    """
    output, first = tl.program_id(0).to(tl.int64), 2 * tl.program_id(2).to(tl.int64)
    own, lines = tl.program_id(1), tl.num_programs(1)
    u += first * row_stride + output % channels * channel_stride + own * length
    z_re = load_signal(u, length, rows - first, N1, N2)
    z_im = load_signal(u + row_stride, length, rows - first - 1, N1, N2)
    z_re, z_im = transform(z_re, z_im, constants, N1, N2, PRECISION)
    spectrum += (output * 2 * lines + own) * N1 * N2
    z_re, z_im = times(z_re, z_im, spectrum, lines * N1 * N2, CONJUGATE, N1, N2)
    z_re, z_im = invert(z_re, z_im, constants, N1, N2, PRECISION)
    at = tl.arange(0, N1)[:, None] * N2 + tl.arange(0, N2)[None, :]
    y += ((first * outputs + output) * lines + own) * length + at
    tl.store(y, z_re, mask=at < length)
    there = (at < length) & (at * 0 < rows - first - 1)
    tl.store(y + outputs * lines * length, z_im, mask=there)


@triton.jit
def correlate(
    u, dy, constants, dkernel, rows, length, taps, scale, channels, outputs,
    row_stride, channel_stride,
    SEVERAL: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of a line of one kernel, summed over the batch; of SEVERAL lines, both planes.

    With two rows as one complex signal, the real part of the correlation is the sum of both.
    """
    output, own, lines = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    u += output % channels * channel_stride + own * length
    dy += (output * lines + own) * length
    next_row = outputs * lines * length
    s_re, s_im = tl.zeros((N1, N2), tl.float32), tl.zeros((N1, N2), tl.float32)
    for first in range(0, rows, 2):
        pair, line = u + first * row_stride, dy + first * next_row
        z_re = load_signal(pair, length, rows - first, N1, N2)
        z_im = load_signal(pair + row_stride, length, rows - first - 1, N1, N2)
        g_re = load_signal(line, length, rows - first, N1, N2)
        g_im = load_signal(line + next_row, length, rows - first - 1, N1, N2)
        z_re, z_im = transform(z_re, z_im, constants, N1, N2, PRECISION)
        g_re, g_im = transform(g_re, g_im, constants, N1, N2, PRECISION)
        s_re += z_re * g_re + z_im * g_im
        s_im += z_re * g_im - z_im * g_re
    s_re, s_im = invert(s_re, s_im, constants, N1, N2, PRECISION)
    at = tl.arange(0, N1)[:, None] * N2 + tl.arange(0, N2)[None, :]
    dkernel += (output * lines + own) * taps + at
    tl.store(dkernel, s_re * scale, mask=at < taps)
    if SEVERAL:
        tl.store(dkernel + outputs * lines * taps, s_im * scale, mask=at < taps)


@triton.jit
def line_place(WIDTH: tl.constexpr, M: tl.constexpr, N1: tl.constexpr):
    """Places of some columns of a matrix (N1, M)."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    return tl.arange(0, N1)[:, None] * M + column[None, :]


@triton.jit
def spread(
    u, constants, lines, rows, length, channels, row_stride, channel_stride,
    M: tl.constexpr, WIDTH: tl.constexpr, N1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From two rows of a channel to N1 lines of M points: transforms across, twiddle factors."""
    line = tl.program_id(0).to(tl.int64)
    first, channel = line // channels * 2, line % channels
    at = line_place(WIDTH, M, N1)
    u += first * row_stride + channel * channel_stride
    inside = at < length
    z_re = tl.load(u + at, mask=inside & (at * 0 < rows - first), other=0.0).to(tl.float32)
    other = inside & (at * 0 < rows - first - 1)
    z_im = tl.load(u + row_stride + at, mask=other, other=0.0).to(tl.float32)
    f_re, f_im = load_matrix(constants, N1, N1), load_matrix(constants + N1 * N1, N1, N1)
    z_re, z_im = product(f_re, f_im, z_re, z_im, PRECISION)
    twiddle = constants + 2 * N1 * N1 + at
    w_re, w_im = tl.load(twiddle), tl.load(twiddle + N1 * M)
    lines += (first * channels + channel) * N1 * M + at
    tl.store(lines, z_re * w_re - z_im * w_im)
    tl.store(lines + channels * N1 * M, z_re * w_im + z_im * w_re)


@triton.jit
def gather(
    lines, constants, y, rows, length, outputs,
    M: tl.constexpr, WIDTH: tl.constexpr, N1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of ``spread``, times N1."""
    line = tl.program_id(0).to(tl.int64)
    first, output = line // outputs * 2, line % outputs
    at = line_place(WIDTH, M, N1)
    lines += (first * outputs + output) * N1 * M + at
    z_re, z_im = tl.load(lines), tl.load(lines + outputs * N1 * M)
    twiddle = constants + 2 * N1 * N1 + at
    w_re, w_im = tl.load(twiddle), tl.load(twiddle + N1 * M)
    z_re, z_im = z_re * w_re + z_im * w_im, z_im * w_re - z_re * w_im
    f_re, f_im = load_matrix(constants, N1, N1), load_matrix(constants + N1 * N1, N1, N1)
    z_re, z_im = product(f_re, -f_im, z_re, z_im, PRECISION)
    y += (first * outputs + output) * length + at
    tl.store(y, z_re, mask=at < length)
    tl.store(y + outputs * length, z_im, mask=(at < length) & (at * 0 < rows - first - 1))
