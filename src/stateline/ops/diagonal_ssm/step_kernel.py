"""One step of diagonal recurrences, on states that change in place.

Every loop reads and writes the same entries of one array: given one array for both the old and the
new states, LLVM would not vectorise the loops, because it cannot exclude a partial overlap. Arrays
are not flattened: numba allows negative indices, and LLVM sees that an index is not negative only
if the innermost axis has its own index.
"""

# mypy: ignore-errors

import numpy as np
import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.transition_kernel import transition
from stateline.ops.numba_common.jit import kernel, summing_kernel
from stateline.ops.numba_common.launch import array


def transitions(log_a: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Planes (4, channel * mode) of the transitions; see ``rounded_transition``."""
    return rounded_transition(array(log_a, dtype), np.empty(0, array(log_a[:0], dtype).dtype))


def rows_of(dtype: torch.dtype, *vectors: Tensor) -> list[np.ndarray]:
    """Vectors (channel, mode, 2) as arrays (channel, 2 modes)."""
    return [array(x, dtype).reshape(len(x), -1) for x in vectors]


@kernel
def rounded_transition(log_a, dtype_of):
    """Planes (4, mode) of all transitions: rounded to the precision of an array, and the rest."""
    a = np.empty(log_a.size)
    transition(log_a.reshape(-1), a)
    size = a.size // 2
    planes = np.empty((4, size), dtype_of.dtype)
    for n in range(size):
        planes[0, n], planes[1, n] = a[n], a[size + n]
        planes[2, n] = a[n] - np.float64(planes[0, n])
        planes[3, n] = a[size + n] - np.float64(planes[1, n])
    return planes


@kernel
def planes_of(a, head, modes):
    """The four planes of the transitions of one channel; one channel may serve all."""
    n = head * modes if a.shape[1] > modes else 0
    return a[0, n : n + modes], a[1, n : n + modes], a[2, n : n + modes], a[3, n : n + modes]


@kernel
def rotate_modes(x, ar, ai, er, ei, b, u):
    """Set x = a x + b u for the modes of one channel, with a = ar + er + i (ai + ei).

    Reordered sums would lose the rest e of the rounded transition.
    """
    for n in range(len(ar)):
        xr, xi = x[2 * n], x[2 * n + 1]
        rest_r = er[n] * xr - ei[n] * xi + b[2 * n] * u
        rest_i = er[n] * xi + ei[n] * xr + b[2 * n + 1] * u
        x[2 * n] = ar[n] * xr - ai[n] * xi + rest_r
        x[2 * n + 1] = ar[n] * xi + ai[n] * xr + rest_i


@summing_kernel
def read_modes(c, z):
    """2 Re c z, for one output of one channel."""
    total = c.dtype.type(0)
    for n in range(len(c) // 2):
        total += c[2 * n] * z[2 * n] - c[2 * n + 1] * z[2 * n + 1]
    return 2 * total


@summing_kernel
def diagonal_advance(u, a, b, c, skip, x, y, start, stop):
    """Channels ``start`` to ``stop`` of states x (row, channel, 2 modes), outputs into y."""
    rows, channels = u.shape
    modes = b.shape[1] // 2
    for channel in range(start, stop):
        ar, ai, er, ei = planes_of(a, channel, modes)
        for row in range(rows):
            now = u[row, channel]
            rotate_modes(x[row, channel], ar, ai, er, ei, b[channel], now)
            for output in range(channel, c.shape[0], channels):
                y[row, output] = read_modes(c[output], x[row, channel]) + skip[output] * now
