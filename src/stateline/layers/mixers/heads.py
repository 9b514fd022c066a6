"""What the attention layers have in common: heads, biases of projections, rotary positions."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import rotary as turn
from stateline.ops.positions import RopeScaling, rotation

Biases = bool | Literal["qkv", "out"]
"""Projections with a bias: all, none, those of queries, keys and values, or the last one."""

Scaling = Literal["none", "linear", "llama3"]


def head_sizes(
    d_model: int, n_heads: int, n_kv_heads: int | None, d_head: int | None
) -> tuple[int, int]:
    """Number of heads of keys and values, and width of a head.

    Raises:
        InputError: If a number is not positive or does not divide another.
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads < 1 or (d_head is None and d_model % n_heads):
        raise InputError(f"n_heads must divide d_model, got {n_heads=} and {d_model=}")
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise InputError(f"n_kv_heads must divide n_heads, got {n_kv_heads=} and {n_heads=}")
    if d_head is not None and d_head < 1:
        raise InputError(f"d_head must be at least 1, got {d_head=}")
    return n_kv_heads, d_head or d_model // n_heads


class Rotary(NamedTuple):
    """Rotary positions of queries and keys.

    Attributes:
        dims: Entries of a head that are rotated.
        base: Wavelength of the slowest rotation, in units of 2 pi tokens.
        scaling: Change of the frequencies.
    """

    dims: int
    base: float
    scaling: RopeScaling | None

    def __call__(
        self,
        positions: Int[Tensor, "rows length"],
        *vectors: Float[Tensor, "batch length _ d_head"],
    ) -> list[Float[Tensor, "batch length _ d_head"]]:
        """Rotate queries, keys or both by the angles of their positions."""
        dtype = torch.promote_types(vectors[0].dtype, torch.float32)
        angles = rotation(
            positions, dims=self.dims, base=self.base, scaling=self.scaling, dtype=dtype
        )
        return [turn(x, *angles) for x in vectors]


def rotary(
    d_head: int,
    fraction: float,
    base: float,
    kind: Scaling,
    scaling: tuple[float, float, float, int],
) -> Rotary:
    """Rotary positions, from the options of a layer.

    Args:
        d_head: Width of a head.
        fraction: Fraction of a head's entries that is rotated.
        base: See :class:`Rotary`.
        kind: How frequencies are scaled.
        scaling: Factor, low, high and original length of :class:`RopeScaling`.

    Raises:
        InputError: If the entries to rotate are not pairs, or the scaling is impossible.
    """
    dims = int(d_head * fraction) // 2 * 2
    if not 2 <= dims <= d_head:
        raise InputError(
            "rope rotates pairs of entries: rotary_fraction * d_head must be from 2 to d_head, "
            f"got rotary_fraction={fraction} and {d_head=}"
        )
    if kind == "none":
        return Rotary(dims, base, None)
    factor, low, high, original = scaling
    if factor <= 0 or original < 1 or (kind == "llama3" and not 0 < low < high):
        raise InputError(
            "rope_scaling needs a positive rope_factor and rope_original_len, and "
            f"0 < rope_low < rope_high, got {factor}, {original:g}, {low} and {high}"
        )
    return Rotary(dims, base, RopeScaling(kind, factor, low, high, int(original)))
