"""The parameters of an op in the layout of the kernels, and their gradients back."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.diagonal_ssm.numba_kernel import GRADIENTS, PLANES, pack, unpack
from stateline.ops.diagonal_ssm.transition_kernel import transition
from stateline.ops.numba_common.blocks import MODES, WIDE
from stateline.ops.numba_common.launch import flat
from stateline.ops.numba_common.vector import LANES

Array = NDArray[Any]

ROW_PIECES = 8
"""Parts of the batch with gradients of their own; fixed, so that threads do not change a sum."""


class Coefficients:
    """Coefficients of a diagonal SSM.

    Args:
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        dtype: Precision of the kernels.
        fold: Whether b becomes a factor of c, for a recurrence whose states are not returned.
    """

    def __init__(
        self, log_a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype, *, fold: bool
    ) -> None:
        self.dtype, self.fold = dtype, fold
        self.channels, self.modes = b.shape[:2]
        self.log_a, self.b, self.c = (flat(x, dtype) for x in (log_a, b, c))
        self.a = np.empty(self.log_a.size)
        transition(self.log_a, self.a)
        self.blocks = -(-self.channels // LANES)
        self.size = self.blocks * -(-self.modes // MODES) * WIDE
        self.packed = np.empty(self.size * PLANES, self.b.dtype)
        pack(self.packed, self.a, self.b, self.c, self.channels, self.modes, fold)

    def empty_gradients(self, pieces: int) -> Array:
        """Room for ``pieces`` gradients of the packed coefficients: float64, for they are sums."""
        return np.empty(pieces * self.size * GRADIENTS)

    def unpack(self, gradients: Array, pieces: int) -> list[Array]:
        """Gradients of log_a, b and c."""
        found = [np.empty_like(x) for x in (self.log_a, self.b, self.c)]
        sizes = self.channels, self.modes, self.fold
        total = gradients.reshape(pieces, -1).sum(0)
        unpack(total, self.a, self.b, self.c, *found, *sizes)
        return found
