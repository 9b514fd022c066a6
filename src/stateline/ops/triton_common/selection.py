"""Products in which zero hides what is not finite.

What a time must not see is masked by zeros, in matrices and as decays. But zero times infinity is
NaN, which would reach other documents and earlier times.
"""

import triton
import triton.language as tl


@triton.jit
def times(weight, x):
    """Product with a weight, zero where the weight is zero."""
    return tl.where(weight == 0, 0.0, weight * x)


@triton.jit
def is_finite(x):
    """Whether numbers are neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def dot(x, matrix, PRECISION: tl.constexpr):
    """Product of signals and a matrix: a result is NaN if it sees something that is not finite."""
    right = is_finite(x)
    total = tl.dot(tl.where(right, x, 0.0), matrix, input_precision=PRECISION)
    wrong = 1 - right.to(tl.int32)
    if tl.max(wrong) > 0:
        seen = tl.dot(wrong.to(tl.float32), (matrix != 0).to(tl.float32))
        total = tl.where(seen > 0, float("nan"), total)
    return total
