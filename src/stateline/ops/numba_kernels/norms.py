"""Layer normalisation of rows."""

# mypy: ignore-errors

import math

from stateline.ops.numba_kernels.jit import summing_kernel


@summing_kernel
def _moments(x):
    """Mean and variance."""
    total, squares, count = x.dtype.type(0), x.dtype.type(0), x.dtype.type(len(x))
    for i in range(len(x)):
        total += x[i]
    mean = total / count
    for i in range(len(x)):
        squares += (x[i] - mean) * (x[i] - mean)
    return mean, squares / count


@summing_kernel
def _normalise(y, x, weight, bias, mean, scale):
    for i in range(len(x)):
        y[i] = weight[i] * ((x[i] - mean) * scale) + bias[i]


@summing_kernel
def forward(x, weight, bias, y, moments, eps, start, stop):
    """Rows ``start`` to ``stop``; their means and factors are for ``backward``."""
    for row in range(start, stop):
        mean, variance = _moments(x[row])
        scale = x.dtype.type(1 / math.sqrt(variance + eps))
        moments[0, row], moments[1, row] = mean, scale
        _normalise(y[row], x[row], weight, bias, mean, scale)


@summing_kernel
def _means(g, x, weight, mean, scale):
    """Means of the gradient of the normalised entries, and of its products with them."""
    total, product, count = x.dtype.type(0), x.dtype.type(0), x.dtype.type(len(x))
    for i in range(len(x)):
        above = g[i] * weight[i]
        total += above
        product += above * ((x[i] - mean) * scale)
    return total / count, product / count


@summing_kernel
def _retreat(dx, g, x, weight, mean, scale, total, product):
    for i in range(len(x)):
        dx[i] = scale * (g[i] * weight[i] - total - (x[i] - mean) * scale * product)


@summing_kernel
def _add_sums(dweight, dbias, g, x, mean, scale):
    for i in range(len(x)):
        dweight[i] += g[i] * ((x[i] - mean) * scale)
        dbias[i] += g[i]


@summing_kernel
def backward(g, x, weight, moments, dx, sums, start, stop):
    """Pieces ``start`` to ``stop`` of the rows; sums (piece, 2, entry) begin with zeros."""
    pieces = len(sums)
    for piece in range(start, stop):
        for row in range(len(x) * piece // pieces, len(x) * (piece + 1) // pieces):
            mean, scale = moments[0, row], moments[1, row]
            total, product = _means(g[row], x[row], weight, mean, scale)
            _retreat(dx[row], g[row], x[row], weight, mean, scale, total, product)
            _add_sums(sums[piece, 0], sums[piece, 1], g[row], x[row], mean, scale)
