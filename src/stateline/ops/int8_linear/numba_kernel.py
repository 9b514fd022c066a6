"""CPU kernels of the linear map by integers."""

# mypy: ignore-errors

import numpy as np

from stateline.ops.numba_common.jit import summing_kernel

GROUP = 64
"""As in the package; a constant of a kernel stands in its file, whose hash finds compiled code."""


@summing_kernel
def products(x, codes, scales, y, first, end):
    """Rows ``first`` to ``end`` of the weight, multiplied by every input."""
    d_in = codes.shape[1]
    whole = d_in // GROUP
    for i in range(first, end):
        for row in range(len(x)):
            total = np.float32(0)
            for group in range(whole):
                part = np.float32(0)
                for j in range(group * GROUP, group * GROUP + GROUP):
                    part += x[row, j] * np.float32(codes[i, j])
                total += part * scales[i, group]
            if whole * GROUP < d_in:
                part = np.float32(0)
                for j in range(whole * GROUP, d_in):
                    part += x[row, j] * np.float32(codes[i, j])
                total += part * scales[i, whole]
            y[row, i] = total


@summing_kernel
def widen(codes, scales, matrix, first, end):
    """Rows ``first`` to ``end`` of the matrix."""
    d_in = codes.shape[1]
    whole = d_in // GROUP
    for i in range(first, end):
        for group in range(whole):
            for j in range(group * GROUP, group * GROUP + GROUP):
                matrix[i, j] = scales[i, group] * np.float32(codes[i, j])
        for j in range(whole * GROUP, d_in):
            matrix[i, j] = scales[i, whole] * np.float32(codes[i, j])
