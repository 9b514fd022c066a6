"""Linear maps of groups of rows, each group by a matrix of its own."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.kernel_op import KernelOp


def grouped_linear(
    x: Float[Tensor, "row d_in"],
    weight: Float[Tensor, "group d_out d_in"],
    counts: Int[Tensor, " group"],
) -> Float[Tensor, "row d_out"]:
    """Map the first ``counts[0]`` rows by the first matrix, the next ones by the second, and so on.

    On a GPU in bfloat16 it is one kernel, which needs no sizes on the host; elsewhere one product
    for each group that has rows.

    Args:
        x: The rows, in the order of the groups.
        weight: One matrix per group.
        counts: Rows of each group; their sum is the number of rows.

    Example:
        >>> weight = torch.tensor([[[1.0]], [[10.0]]])
        >>> grouped_linear(torch.ones(3, 1), weight, torch.tensor([1, 2])).flatten()
        tensor([ 1., 10., 10.])
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        lower = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(lower), weight.to(lower)
    y: Tensor = _mapped(x, weight, counts)
    return y


def _forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    aligned = all(size % 8 == 0 for size in weight.shape[1:])  # rows of whole 16 bytes
    if x.is_cuda and x.dtype is weight.dtype is torch.bfloat16 and aligned:
        return torch._grouped_mm(x.contiguous(), weight.mT, offs=counts.cumsum(0).int())
    y = x.new_empty(len(x), weight.shape[1])
    if x.is_meta:
        return y
    for rows, matrix, out in zip(*_groups(counts, x, weight, y), strict=True):
        torch.mm(rows, matrix.T, out=out)
    return y


def _backward(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    of_weight = torch.zeros_like(weight)
    of_x = _forward(grad, weight.mT.contiguous(), counts)
    if not x.is_meta:
        for rows, change, out in zip(*_groups(counts, grad, of_weight, x), strict=True):
            torch.mm(rows.T, out, out=change)
    return of_x, of_weight


def _groups(
    counts: Tensor, rows: Tensor, matrices: Tensor, others: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The parts of the groups that have rows."""
    sizes = counts.tolist()
    used = [i for i, size in enumerate(sizes) if size]
    parts, outs = rows.split(sizes), others.split(sizes)
    return [parts[i] for i in used], [matrices[i] for i in used], [outs[i] for i in used]


_mapped = KernelOp(
    "grouped_linear",
    _forward,
    _backward,
    lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[1]),
)
