"""The linear map by integers, by PyTorch's product with the matrix that they stand for."""

import torch
from torch import Tensor

from stateline.ops.int8_linear import Int8Weight, from_int8
from stateline.ops.linear import linear


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Make the matrix and multiply."""
    wide = torch.promote_types(x.dtype, weight.scales.dtype)
    y = linear(x.to(wide), from_int8(weight).to(wide), None if bias is None else bias.to(wide))
    return y.to(x.dtype)
