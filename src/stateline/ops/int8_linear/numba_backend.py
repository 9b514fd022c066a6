"""The linear map by integers, which are read as they are: kernels compiled by numba for the CPU."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import wants_gradient
from stateline.ops.int8_linear import Int8Weight
from stateline.ops.int8_linear.numba_kernel import products, widen
from stateline.ops.linear import product
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import array, fan_out, output

FEW = 4
"""Most inputs that are multiplied by codes; for more, making the matrix costs less."""

PIECE = 1 << 17
"""Entries of a matrix that are made at a time, to be multiplied while they lie in the cache."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    x, weight, bias = inputs
    if torch.compiler.is_compiling():
        return "compiled functions take PyTorch's operators"
    if wants_gradient(*inputs):
        return "the numba kernels record no gradient"
    if torch.float64 in (x.dtype, weight.scales.dtype):
        return "the numba kernels compute in float32"
    return launch.can_run(function, x, weight.scales, bias)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Multiply few inputs by the codes, and many by the matrix, piece by piece."""
    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    codes, scales = weight.codes.contiguous().numpy(), array(weight.scales, torch.float32)
    if len(rows) <= FEW:
        y, found = output((len(rows), len(codes)), torch.float32)
        arguments = (array(rows, torch.float32), codes, scales, found)
        fan_out(products, arguments, len(codes), codes.size * len(rows) * 0.06)
    else:
        y = _by_pieces(rows, codes, scales)
    y = y if bias is None else y.add_(bias)
    return y.to(x.dtype).view(*x.shape[:-1], len(codes))


def _by_pieces(rows: Tensor, codes: Any, scales: Any) -> Tensor:
    d_out, d_in = codes.shape
    size = max(1, PIECE // d_in)
    y = rows.new_empty(len(rows), d_out)
    matrix, entries = output((size, d_in), torch.float32)
    for first in range(0, d_out, size):
        end = min(d_out, first + size)
        piece = (codes[first:end], scales[first:end], entries)
        fan_out(widen, piece, end - first, (end - first) * d_in * 0.1)
        y[:, first:end] = product(rows, matrix[: end - first])
    return y
