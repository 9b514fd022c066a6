"""The definition of GELU in its tanh approximation."""

import math

from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Evaluate the formula."""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + u.tanh())
