"""Linear map whose weight is kept as integers of 8 bits, with a factor for each group."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from stateline.ops.bound import Backend, bound
from stateline.ops.op import Example, Op, Sizes

GROUP = 64
"""Neighbours in a row of the weight that have one factor."""


class Int8Weight(NamedTuple):
    """A matrix as integers and factors: entry (i, j) is ``codes[i, j] * scales[i, j // 64]``.

    Attributes:
        codes: Integers from -127 to 127.
        scales: A factor for each group of 64 neighbours in a row; the last group may be shorter.
    """

    codes: Int8[Tensor, "d_out d_in"]
    scales: Float[Tensor, "d_out group"]


def to_int8(weight: Float[Tensor, "d_out d_in"]) -> Int8Weight:
    """Round a matrix: the largest entry of each group becomes 127 or -127.

    Each entry is off by at most half a scale, 1/254 of the largest entry of its group.

    Example:
        >>> to_int8(torch.tensor([[1.0, -0.5, 0.0]]))
        Int8Weight(codes=tensor([[127, -64,   0]], dtype=torch.int8), scales=tensor([[0.0079]]))
    """
    d_out, d_in = weight.shape
    groups = -(-d_in // GROUP)
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, groups * GROUP - d_in))
    grouped = padded.view(d_out, groups, GROUP)
    scales = grouped.abs().amax(dim=2) / 127
    codes = (grouped / scales.where(scales > 0, 1.0)[..., None]).round().to(torch.int8)
    return Int8Weight(codes.flatten(1)[:, :d_in].contiguous(), scales)


def from_int8(weight: Int8Weight) -> Tensor:
    """The rounded matrix, or rows of it, in the dtype of the scales."""
    factors = weight.scales.repeat_interleave(GROUP, dim=-1)
    return weight.codes * factors[..., : weight.codes.shape[-1]]


def example(sizes: Sizes) -> Example:
    """A square map, for a token of each row."""
    width = sizes.d_model
    weight = to_int8(sizes.weight(width, width))
    x = sizes.signal()[:, 0]
    return Example((x, weight, sizes.weight(width)), 2.0 * sizes.batch * width * width)


OP = Op(__name__, ["numba"], example)


def _fits(weight: Int8Weight) -> str:
    """What is wrong with a weight, or an empty string."""
    (_, d_in), groups = weight.codes.shape, weight.scales.shape[1]
    if groups != -(-d_in // GROUP):
        return f"a row of {d_in} codes needs {-(-d_in // GROUP)} scales, got {groups}"
    return ""


@bound(OP, _fits, autocast=False)
def int8_linear(
    x: Float[Tensor, "*batch d_in"],
    weight: Int8Weight,
    bias: Float[Tensor, " d_out"] | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "*batch d_out"]:
    r"""Map the last axis by a weight of integers, which takes a quarter of the memory of float32.

    .. math:: y_i = b_i + \sum_j x_j\, c_{ij}\, s_{i, \lfloor j / 64 \rfloor}

    Only the weight is rounded. Inputs are not, so an output depends on its own input alone. Sums
    are taken in float32 at least.

    Args:
        x: Inputs.
        weight: Codes c and scales s, see :func:`stateline.ops.int8_linear.to_int8`.
        bias: Added to the outputs.

    Returns:
        Outputs in the dtype of ``x``.

    Example:
        >>> int8_linear(torch.ones(2), to_int8(torch.tensor([[1.0, 1.0]])))
        tensor([2.])

    References:
        Yao et al., "ZeroQuant", NeurIPS 2022, for the groups of a row.
    """
    return backend(x, weight, bias)
