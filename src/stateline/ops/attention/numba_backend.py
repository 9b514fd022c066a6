"""Causal attention in kernels compiled by numba for the CPU: no scores in memory, any masks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateline.ops.attention import numba_kernel as softmax
from stateline.ops.dispatch import wants_gradient
from stateline.ops.joined import side_by_side
from stateline.ops.kernel_op import define_kernel_op, empty_like
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, strided
from stateline.ops.thresholds import threshold


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    slopes = inputs[4]
    if inputs[0].shape[2] != inputs[1].shape[2]:
        return "the numba kernel wants as many heads of keys as of queries"
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        return "the numba kernel gives no gradient to slopes"
    q, (start, slopes, windows) = inputs[0], inputs[3:]
    if start is slopes is windows is None and q.shape[-1] > threshold("attention.narrow_head"):
        return "plain causal attention of wide heads is faster by PyTorch's fused kernel"
    return launch.can_use(*inputs[:3])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    slopes: Tensor | None,
    windows: Tensor | None,
) -> Tensor:
    """Attend in blocks of queries and tiles of keys."""
    batch, heads = len(q), q.shape[2]
    if start is None:
        start = torch.zeros(batch, dtype=torch.int64)
    if slopes is None:
        slopes = torch.zeros(heads, dtype=launch.working_dtype(q))
    if windows is None:
        windows = torch.full((heads,), softmax.EVERYTHING)
    inputs = (q, k, v, start, slopes, windows)
    if torch.compiler.is_compiling() or type(q) is not Tensor or not wants_gradient(q, k, v):
        return _attention(*inputs)
    return _Saving.apply(*inputs)


def attend_few(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """Plain causal attention of few queries, without a gradient."""
    return _of_few(q, k, v, start, *_no_masks(q))


def attend_many(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
    """The same in blocks of queries."""
    return _of_many(q, k, v, start, *_no_masks(q))


def _no_masks(q: Tensor) -> tuple[Tensor, Tensor]:
    heads = q.shape[2]
    return torch.zeros(heads, dtype=q.dtype), torch.full((heads,), softmax.EVERYTHING)


def _run(kernel: Any, arrays: tuple[Any, ...], q: Tensor, k: Tensor, *others: Any) -> None:
    """Run a kernel over all rows and heads; others: places, and the entries between tokens."""
    (batch, length, heads, d), slots = q.shape, k.shape[1]
    starts, slopes, windows, *strides = others
    numbers = (
        flat(starts, torch.int64),
        flat(slopes, launch.working_dtype(q)),
        flat(windows, torch.int64),
    )
    work = 0.2 * batch * heads * length * slots * d
    arguments = (*arrays, *numbers, *strides, length, slots, heads, d)
    fan_out(kernel, arguments, batch * heads, work)


def _read(dtype: torch.dtype, *signals: Tensor) -> Any:
    """Queries, keys and values as they lie in memory, and the entries between their tokens."""
    return zip(*(strided(x.flatten(2), dtype) for x in signals), strict=True)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, slopes: Tensor, windows: Tensor
) -> Tensor:
    few = q.shape[1] <= threshold("attention.few_queries")
    return (_of_few if few else _of_many)(q, k, v, start, slopes, windows)


def _of_few(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, slopes: Tensor, windows: Tensor
) -> Tensor:
    dtype = launch.working_dtype(q)
    y = torch.empty(q.shape, dtype=dtype)
    arrays = (flat(x, dtype) for x in (q, k, v, y))
    strides = (x.shape[2:].numel() for x in (q, k, v))
    _run(softmax.step, (*arrays,), q, k, start, slopes, windows, *strides)
    return y.to(q.dtype)


def _of_many(*inputs: Tensor) -> Tensor:
    return _with_norms(*inputs)[0].to(inputs[0].dtype)


def _with_norms(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, slopes: Tensor, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """The output, and for each query the logarithm of the sum of its weights."""
    dtype = launch.working_dtype(q)
    y = torch.empty(q.shape, dtype=dtype)
    norms = torch.empty((len(q), q.shape[2], q.shape[1]), dtype=dtype)
    signals, strides = _read(dtype, q, k, v)
    arrays = *signals, flat(y, dtype), flat(norms, dtype)
    _run(softmax.forward, arrays, q, k, start, slopes, windows, *strides)
    return y, norms


def _gradients(grad: Tensor, y: Tensor, norms: Tensor, *inputs: Tensor) -> Any:
    """Gradients of queries, keys and values."""
    q, k, v, *places = inputs
    dtype = launch.working_dtype(q)
    signals, strides = _read(dtype, q, k, v)
    gradients, found, apart = zip(*side_by_side(dtype, q, k, v), strict=True)
    arrays = flat(grad, dtype), *signals, flat(y, dtype), flat(norms, dtype), *found
    _run(softmax.backward, arrays, q, k, *places, *strides, *apart)
    return tuple(g.to(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    slopes: Tensor,
    windows: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, start, slopes, windows)
    constants = (torch.zeros_like(x) for x in (start, slopes, windows))
    return (*_gradients(grad, *_with_norms(*inputs), *inputs), *constants)


class _Saving(torch.autograd.Function):
    """Attention that saves its output and norms, so that the backward pass need not repeat it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        y, norms = _with_norms(*inputs)
        ctx.save_for_backward(y, norms, *inputs)  # y in full precision
        return y.to(inputs[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (*_gradients(grad, *ctx.saved_tensors), None, None, None)


_attention = define_kernel_op(
    "attention_kernel",
    _forward,
    _backward,
    lambda q, *_: q.new_empty(q.shape),
    lambda grad, *inputs: empty_like(*inputs),  # noqa: ARG005
)
