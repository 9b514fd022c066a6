r"""Maps of a few rows, GELU with its derivative, SwiGLU, norms, and the rotation of pairs.

With :math:`s = \sigma(2u)`, GELU is :math:`x s`, and its derivative
:math:`s + 2 x s (1 - s) u'`.
"""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.blocks import dot
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import LOG2_E, entry, exp2, load, number, put, store

TOGETHER = 8
"""Pairs that are rotated together."""

ROWS = 64
"""Rows whose gradients of a weight are summed together, whatever the number of threads."""

CUBIC = 0.044715
SCALE = 2 * math.sqrt(2 / math.pi)


@summing_kernel
def multiply(x, weight, y, start, stop):
    """Outputs ``start`` to ``stop`` of every row; x and the weight are flat."""
    rows, outputs = y.shape
    width = len(weight) // outputs
    for place in range(start, stop):
        for row in range(rows):
            y[row, place] = dot(x, row * width, weight, place * width, width)


@summing_kernel
def gelu_of_sum(x, bias, y, start, stop):
    """Y = gelu(x + bias) for rows ``start`` to ``stop``; the derivative overwrites x."""
    linear, cubic = number(x, -SCALE * LOG2_E), number(x, -SCALE * LOG2_E * CUBIC)
    slope, curve = number(x, SCALE), number(x, 3 * SCALE * CUBIC)
    one, most = number(x, 1.0), number(x, 126.0)
    for row in range(start, stop):
        at = row * len(bias)
        for i in range(len(bias)):
            z = entry(x, at + i) + bias[i]
            square = z * z
            power = z * (linear + cubic * square)
            s = one / (one + exp2(power if power < most else most))
            put(y, at + i, z * s)
            put(x, at + i, s * (one + z * (one - s) * (slope + curve * square)))


@summing_kernel
def gate(h, y, width, start, stop):
    """Y = silu(g) u for rows ``start`` to ``stop``; the halves of h are g and u."""
    one, most, power_of_e = number(h, 1.0), number(h, 126.0), number(h, -LOG2_E)
    for row in range(start, stop):
        to, at = row * width, 2 * row * width
        for i in range(width):
            g = entry(h, at + i)
            power = g * power_of_e
            s = one / (one + exp2(power if power < most else most))
            put(y, to + i, g * s * entry(h, at + width + i))


@summing_kernel
def gate_backward(h, grad, found, width, start, stop):
    """The gradient of h, from that of y."""
    one, most, power_of_e = number(h, 1.0), number(h, 126.0), number(h, -LOG2_E)
    gates = np.full(width, one)
    for row in range(start, stop):
        of_y, at = row * width, 2 * row * width
        for i in range(width):
            power = entry(h, at + i) * power_of_e
            gates[i] = one / (one + exp2(power if power < most else most))
        for i in range(width):  # loops of one store each are compiled to vector instructions
            put(found, at + width + i, entry(grad, of_y + i) * entry(h, at + i) * gates[i])
        for i in range(width):
            g, s, u = entry(h, at + i), gates[i], entry(h, at + width + i)
            put(found, at + i, entry(grad, of_y + i) * u * s * (one + g * (one - s)))


@summing_kernel
def normalise(x, weight, y, eps, start, stop):
    """Y = w x / sqrt(mean(x^2) + eps) for rows ``start`` to ``stop``."""
    width = len(weight)
    for row in range(start, stop):
        at, total = row * width, number(x, 0.0)
        for i in range(width):
            total += entry(x, at + i) * entry(x, at + i)
        scale = number(x, 1 / math.sqrt(total / width + eps))
        for i in range(width):
            put(y, at + i, entry(x, at + i) * scale * weight[i])


@summing_kernel
def normalise_backward(x, weight, grad, found, of_weight, eps, start, stop):
    """The gradient of x, and for each block of rows ``start`` to ``stop`` its part of that of w."""
    width = len(weight)
    for block in range(start, stop):
        of_weight[block] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, len(x) // width)):
            at, total, along = row * width, number(x, 0.0), number(x, 0.0)
            for i in range(width):
                z = entry(x, at + i)
                total += z * z
                along += z * entry(grad, at + i) * weight[i]
            scale = number(x, 1 / math.sqrt(total / width + eps))
            back = number(x, along * scale * scale / width)
            for i in range(width):
                z, change = entry(x, at + i), entry(grad, at + i)
                put(found, at + i, scale * (change * weight[i] - z * back))
                of_weight[block, i] += change * (z * scale)


@kernel
def turn(x, y, cos, sin, length, heads, d, pairs, stride, each_row, sign, start, stop):
    """Rotate pairs of entries of tokens ``start`` to ``stop``; ``sign`` -1 turns back.

    Tokens of x are ``stride`` entries apart. Angles are (row, token, pair), with a row for each row
    of x or, unless ``each_row``, one for all.
    """
    direction, whole = number(x, sign), pairs // TOGETHER * TOGETHER
    for token in range(start, stop):
        place = (token if each_row else token % length) * pairs
        for head in range(heads):
            at, to = token * stride + head * d, (token * heads + head) * d
            for i in range(0, whole, TOGETHER):
                c, s = load(cos, place + i, TOGETHER), direction * load(sin, place + i, TOGETHER)
                first, second = load(x, at + i, TOGETHER), load(x, at + pairs + i, TOGETHER)
                store(y, to + i, first * c - second * s)
                store(y, to + pairs + i, first * s + second * c)
            for i in range(whole, pairs):
                first, second = entry(x, at + i), entry(x, at + pairs + i)
                c, s = cos[place + i], direction * sin[place + i]
                put(y, to + i, first * c - second * s)
                put(y, to + pairs + i, first * s + second * c)
            for i in range(2 * pairs, d):
                y[to + i] = x[at + i]
