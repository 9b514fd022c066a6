r"""Maps of a few rows, GELU with its derivative, SwiGLU, norms, and the rotation of pairs.

With :math:`s = \sigma(2u)`, GELU is :math:`x s`, and its derivative
:math:`s + 2 x s (1 - s) u'`.
"""

# mypy: ignore-errors

import math

from stateline.ops.numba_common.blocks import dot
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.vector import LOG2_E, exp2, load, store

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
    number = x.dtype.type
    linear, cubic = number(-SCALE * LOG2_E), number(-SCALE * LOG2_E * CUBIC)
    slope, curve = number(SCALE), number(3 * SCALE * CUBIC)
    one, most = number(1), number(126)
    for row in range(start, stop):
        for i in range(len(bias)):
            z = x[row, i] + bias[i]
            square = z * z
            power = z * (linear + cubic * square)
            s = one / (one + exp2(power if power < most else most))
            y[row, i] = z * s
            x[row, i] = s * (one + z * (one - s) * (slope + curve * square))


@summing_kernel
def gate(h, y, start, stop):
    """Y = silu(g) u for rows ``start`` to ``stop``; the halves of h are g and u."""
    width, one, most = y.shape[1], h.dtype.type(1), h.dtype.type(126)
    for row in range(start, stop):
        for i in range(width):
            power = h[row, i] * h.dtype.type(-LOG2_E)
            s = one / (one + exp2(power if power < most else most))
            y[row, i] = h[row, i] * s * h[row, width + i]


@summing_kernel
def gate_backward(h, grad, found, start, stop):
    """The gradient of h, from that of y."""
    width, one, most = grad.shape[1], h.dtype.type(1), h.dtype.type(126)
    for row in range(start, stop):
        for i in range(width):
            power = h[row, i] * h.dtype.type(-LOG2_E)
            found[row, i] = one / (one + exp2(power if power < most else most))
        for i in range(width):  # loops of one store each are compiled to vector instructions
            found[row, width + i] = grad[row, i] * h[row, i] * found[row, i]
        for i in range(width):
            s = found[row, i]
            found[row, i] = grad[row, i] * h[row, width + i] * s * (one + h[row, i] * (one - s))


@summing_kernel
def normalise(x, weight, y, eps, start, stop):
    """Y = w x / sqrt(mean(x^2) + eps) for rows ``start`` to ``stop``."""
    width, number = len(weight), x.dtype.type
    for row in range(start, stop):
        total = number(0)
        for i in range(width):
            total += x[row, i] * x[row, i]
        scale = number(1 / math.sqrt(total / width + eps))
        for i in range(width):
            y[row, i] = x[row, i] * scale * weight[i]


@summing_kernel
def normalise_backward(x, weight, grad, found, of_weight, eps, start, stop):
    """The gradient of x, and for each block of rows ``start`` to ``stop`` its part of that of w."""
    width, number = len(weight), x.dtype.type
    for block in range(start, stop):
        of_weight[block] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, len(x))):
            total, along = number(0), number(0)
            for i in range(width):
                total += x[row, i] * x[row, i]
                along += x[row, i] * grad[row, i] * weight[i]
            scale = number(1 / math.sqrt(total / width + eps))
            back = number(along * scale * scale / width)
            for i in range(width):
                unit = x[row, i] * scale
                found[row, i] = scale * (grad[row, i] * weight[i] - x[row, i] * back)
                of_weight[block, i] += grad[row, i] * unit


@kernel
def turn(x, y, cos, sin, length, heads, d, pairs, stride, each_row, sign, start, stop):
    """Rotate pairs of entries of tokens ``start`` to ``stop``; ``sign`` -1 turns back.

    Tokens of x are ``stride`` entries apart. Angles are (row, token, pair), with a row for each row
    of x or, unless ``each_row``, one for all.
    """
    direction, whole = x.dtype.type(sign), pairs // TOGETHER * TOGETHER
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
                first, second = x[at + i], x[at + pairs + i]
                c, s = cos[place + i], direction * sin[place + i]
                y[to + i] = first * c - second * s
                y[to + pairs + i] = first * s + second * c
            for i in range(2 * pairs, d):
                y[to + i] = x[at + i]
