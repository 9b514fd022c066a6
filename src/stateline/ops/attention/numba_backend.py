"""Causal attention in kernels compiled by numba for the CPU: no scores in memory, any masks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateline.ops.attention import AttentionMask
from stateline.ops.attention import numba_kernel as softmax
from stateline.ops.dispatch import wants_gradient
from stateline.ops.kernel_op import is_plain
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, strided
from stateline.ops.numba_common.vector import LANES

LEAST, QUERIES, NARROW, NARROW_SSE = 1 << 20, 64, 8, 16
"""Products and queries of plain attention from which this kernel is faster than PyTorch's; width of
heads up to which it is so with fewer of them; width up to which it is so with vectors of SSE.

Whole updates of two layers by PyTorch's over this kernel's, on Zen 5, as AVX2 and as SSE
(examples/kernel_gains.py): 64 queries and heads of 8 1.48, 1.32 and 1.23, of 16 1.11, 1.02 and
1.03; 256 queries and heads of 32 1.34 and 1.14; 512 queries and heads of 64 1.40 and 1.16. With
vectors of SSE, wider heads lose. Masks gain.
"""

FEW_QUERIES = 4
"""Up to this many queries, vectors lie along the entries of a head."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    q, k, v, mask, dropout = inputs
    if q.shape[2] != k.shape[2]:
        return "the numba kernel wants as many heads of keys as of queries"
    if mask.slopes is not None and wants_gradient(mask.slopes):
        return "the numba kernel gives no gradient to slopes"
    if dropout:
        return "the numba kernel has no dropout"
    if torch.compiler.is_compiling() or not is_plain(q):
        return "compiled functions and sharded tensors take PyTorch's operators"
    if mask.plain and not _gains(*q.shape, slots=k.shape[1]):
        return "plain causal attention of these sizes is faster by PyTorch's fused kernel"
    return launch.can_use(q, k, v)


def _gains(batch: int, length: int, heads: int, d: int, *, slots: int) -> bool:
    """Whether plain attention of these sizes is faster here than in PyTorch."""
    many = length >= QUERIES and batch * length * heads * d * slots >= LEAST
    return d <= NARROW or (many and (LANES > 4 or d <= NARROW_SSE))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:  # noqa: ARG001
    """Attend in blocks of queries and tiles of keys."""
    if wants_gradient(q, k, v):
        y: Tensor = _Recorded.apply(q, k, v, mask)
        return y
    few = q.shape[1] <= FEW_QUERIES and mask.first is None
    return _of_few(q, k, v, mask) if few else _with_norms(q, k, v, mask)[0].to(q.dtype)


def _run(kernel: Any, arrays: Any, strides: Any, q: Tensor, k: Tensor, mask: Any) -> None:
    """Run a kernel over all rows and heads; strides: entries between tokens of q, k and v."""
    (batch, length, heads, d), slots, dtype = q.shape, k.shape[1], launch.working_dtype(q)
    start, slopes, windows, first = mask
    numbers = (
        np.zeros(batch, np.int64) if start is None else flat(start, torch.int64),
        flat(q.new_zeros(heads) if slopes is None else slopes, dtype),
        np.full(heads, softmax.EVERYTHING) if windows is None else flat(windows, torch.int64),
        None if first is None else flat(first, torch.int64),
    )
    arguments = (*arrays, *numbers, *strides, length, slots, heads, d)
    fan_out(kernel, arguments, batch * heads, 0.2 * batch * heads * length * slots * d)


def _read(dtype: torch.dtype, *signals: Tensor) -> Any:
    """Queries, keys and values as they lie in memory, and the entries between their tokens."""
    return zip(*(strided(x.flatten(2), dtype) for x in signals), strict=True)


def _of_few(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    dtype = launch.working_dtype(q)
    y = torch.empty(q.shape, dtype=dtype)
    signals, strides = _read(dtype, q, k, v)
    _run(softmax.step, (*signals, flat(y, dtype)), strides, q, k, mask)
    return y.to(q.dtype)


def _with_norms(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """The output, and for each query the logarithm of the sum of its weights."""
    dtype = launch.working_dtype(q)
    y = torch.empty(q.shape, dtype=dtype)
    norms = torch.empty((len(q), q.shape[2], q.shape[1]), dtype=dtype)
    signals, strides = _read(dtype, q, k, v)
    _run(softmax.forward, (*signals, flat(y, dtype), flat(norms, dtype)), strides, q, k, mask)
    return y, norms


class _Recorded(torch.autograd.Function):
    """Attention that saves its output and norms, so that the backward pass need not repeat it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        y, norms = _with_norms(q, k, v, mask)
        ctx.save_for_backward(y, norms, q, k, v, *mask)  # y in full precision
        return y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, norms, q, k, v, *mask = ctx.saved_tensors
        dtype = launch.working_dtype(q)
        signals, strides = _read(dtype, q, k, v)
        found = [torch.empty(x.shape, dtype=dtype) for x in (q, k, v)]
        arrays = *signals, *(flat(x, dtype) for x in (grad, y, norms, *found))
        _run(softmax.backward, arrays, strides, q, k, mask)
        return (*(g.to(q.dtype) for g in found), None)
