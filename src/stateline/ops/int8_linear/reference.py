"""The definition of the linear map by integers."""

import torch
from torch import Tensor

from stateline.ops.int8_linear import GROUP, Int8Weight


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """One group of inputs after the other."""
    wide = torch.promote_types(x.dtype, weight.scales.dtype)
    y = x.new_zeros(*x.shape[:-1], len(weight.codes), dtype=wide)
    parts = zip(x.split(GROUP, dim=-1), weight.codes.split(GROUP, dim=-1), strict=True)
    for group, (inputs, codes) in enumerate(parts):
        y = y + (inputs.to(wide) @ codes.to(wide).T) * weight.scales[:, group]
    return (y if bias is None else y + bias).to(x.dtype)
