"""The linear map by integers, by PyTorch's product with the matrix that they stand for."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.int8_linear import GROUP, Int8Weight
from stateline.ops.linear import linear


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Make the matrix and multiply."""
    wide = torch.promote_types(x.dtype, weight.scales.dtype)
    y = linear(x.to(wide), matrix(weight).to(wide), None if bias is None else bias.to(wide))
    return y.to(x.dtype)


def matrix(weight: Int8Weight) -> Tensor:
    """The matrix (d_out, d_in), in the dtype of the scales."""
    codes, scales = weight
    d_out, d_in = codes.shape
    codes = F.pad(codes, (0, scales.shape[1] * GROUP - d_in)).view(d_out, -1, GROUP)
    return (codes * scales[..., None]).flatten(1)[:, :d_in]
