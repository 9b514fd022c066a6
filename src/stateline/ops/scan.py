r"""The diagonal linear recurrence by matrix products, on any device.

The states of a block are its inputs times a triangular matrix of powers of the transition, plus the
decayed state before the block. The states at the ends of the blocks obey the same recurrence with
:math:`a^{16}` in place of a, and are computed recursively.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.ops.planes import multiply, powers_of

BLOCK = 16
"""Inputs per block.

On a CPU core with 32 or 128 modes, blocks of 32 take 1.1 times as long, blocks of 64 1.5 times.
"""


def scan_flops(length: int) -> float:
    """Operations per mode of the matrix products of :func:`diagonal_scan`."""
    count = math.ceil(length / BLOCK)
    return 2.0 * count * (2 * BLOCK) ** 2 + (scan_flops(count - 1) if count > 1 else 0)


def diagonal_scan(
    v: Float[Tensor, "*batch length mode 2"],
    log_a: Float[Tensor, "mode 2"],
    state: Float[Tensor, "*batch mode 2"],
) -> Float[Tensor, "*batch length mode 2"]:
    r"""All states of :math:`x_t = a x_{t-1} + v_t`."""
    length = v.shape[-3]
    count = math.ceil(length / BLOCK)
    blocks = F.pad(v, (0, 0, 0, 0, 0, count * BLOCK - length)).unflatten(-3, (count, BLOCK))
    decay = powers_of(log_a, torch.arange(BLOCK + 1, device=v.device)).transpose(0, 1).to(v.dtype)
    alone = _from_zero(blocks, decay[:-1])
    before = state[..., None, :, :]
    if count > 1:
        after = diagonal_scan(alone[..., :-1, -1, :, :], BLOCK * log_a, state)
        before = torch.cat([before, after], dim=-3)
    kept = multiply(decay[1:], before[..., None, :, :])
    return (alone + kept).flatten(-4, -3)[..., :length, :, :]


def _from_zero(
    blocks: Float[Tensor, "*batch block mode 2"], decay: Float[Tensor, "block mode 2"]
) -> Float[Tensor, "*batch block mode 2"]:
    """States of every block from the zero state: one matrix product per mode.

    ``decay`` holds the powers 0, 1, ... of the transition.
    """
    index = torch.arange(BLOCK, device=blocks.device)
    distance = index - index[:, None]  # from the input (row) to the state (column)
    real, imag = (decay[distance.clamp(min=0)] * (distance >= 0)[..., None, None]).unbind(dim=-1)
    # complex multiplication as a real matrix
    product = torch.stack(
        [torch.stack([real, imag], dim=-1), torch.stack([-imag, real], dim=-1)], dim=-2
    )  # (input, state, mode, plane in, plane out)
    matrix = product.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    rows = blocks.flatten(0, -4).permute(2, 0, 1, 3).flatten(2)  # (mode, rows, 2 block)
    states = (rows @ matrix).unflatten(-1, (BLOCK, 2))
    return states.permute(1, 2, 0, 3).reshape(blocks.shape)
