"""Causal attention in kernels compiled by numba for the CPU: no scores in memory, any masks."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.attention import AttentionCache, AttentionMask
from stateline.ops.attention import numba_kernel as softmax
from stateline.ops.dispatch import wants_gradient
from stateline.ops.kernel_op import is_plain, once
from stateline.ops.linear import has_matrix_units
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import fan_out, flat, of_token, output, strided
from stateline.ops.numba_common.vector import LANES, LOG2_E

NARROW = 8
"""Entries of a head that fill a vector of AVX2. The vectors of PyTorch's kernel lie along them, so
that with fewer it computes padding; here they lie along queries."""

QUERIES, LEAST = 64, 1 << 22
"""Queries that fill the vectors of a task, and products that take longer than its start: from both
on, scores that stay in registers gain with vectors of eight numbers (examples/kernel_gains.py).
With fewer products, PyTorch's kernel is faster (examples/auto_choice.py)."""

FEW_QUERIES = 4
"""Up to this many queries, vectors lie along the entries of a head."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "attention_step_":
        return _can_step(*inputs)
    q, k, v, mask, dropout = inputs
    if mask.slopes is not None and wants_gradient(mask.slopes):
        return "the numba kernel gives no gradient to slopes"
    if mask.soft_cap is not None and not takes_steps(q, k, v, mask):
        return "with many queries, the numba kernel has no soft cap"
    if dropout:
        return "the numba kernel has no dropout"
    if torch.compiler.is_compiling() or not is_plain(q):
        return "compiled functions and sharded tensors take PyTorch's operators"
    return launch.can_use(q, k, v)


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: every mask and step, and plain attention of some sizes."""
    if function == "attention_step_" or not inputs[3].plain:
        return True
    (batch, length, heads, d), slots = inputs[0].shape, inputs[1].shape[1]
    if _by_matrix_units(*inputs[:3]):
        return wants_gradient(*inputs[:3])
    many = length >= QUERIES and batch * length * heads * d * slots >= LEAST
    return d <= NARROW or (LANES > 4 and many)


def _by_matrix_units(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's forward pass multiplies on matrix units, which is faster.

    Its backward pass is slower than the kernel's, most of all with short rows.
    """
    halves = q.dtype is k.dtype is v.dtype is torch.bfloat16
    return halves and q.shape[3] > NARROW and has_matrix_units()


def _can_step(*inputs: Any) -> str:
    """Why the kernels cannot take this token, or an empty string."""
    q, k, v, cache, mask, frequency, dropout = inputs
    tensors = [x for x in (q, k, v, *cache[:2], frequency) if x is not None]
    if dropout:
        return "the numba kernel has no dropout"
    kinds = {x.dtype for x in tensors}
    if kinds != {torch.float64} and not kinds <= {torch.float32, torch.bfloat16}:
        return "the numba kernel takes float64 alone, or float32 and bfloat16"
    if not all(x.is_contiguous() for x in cache):
        return "the numba kernel takes a contiguous cache"
    return launch.can_step(*tensors, mask.slopes)


def takes_steps(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> bool:
    """Whether the kernel for few queries can run the call."""
    return q.shape[1] <= FEW_QUERIES and mask.first is None and not wants_gradient(q, k, v)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: float) -> Tensor:  # noqa: ARG001
    """Attend in blocks of queries and tiles of keys."""
    return of_few(q, k, v, mask) if takes_steps(q, k, v, mask) else of_many(q, k, v, mask)


def of_many(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, keys: Tensor | None = None
) -> Tensor:
    """Attention in blocks of queries; ``keys`` by distance (distance, d_head) join the others."""
    if wants_gradient(q, k, v, keys):
        y: Tensor = _Recorded.apply(q, k, v, keys, mask)
        return y
    return _with_norms(q, k, v, keys, mask)[0].to(q.dtype)


def attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: AttentionCache,
    mask: AttentionMask,
    frequency: Tensor | None,
    dropout: float,  # noqa: ARG001
) -> Tensor:
    """Rotate and write in one pass, then attend."""
    (_, heads, d), kv_heads = q.shape, k.shape[1]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    y, outputs = output(q.shape, dtype)
    turned = np.empty_like(outputs).reshape(-1)
    own = zip((q, k, v, *cache[:2]), (*[dtype] * 3, cache.k.dtype, cache.v.dtype), strict=True)
    signals = [of_token(x, kind).reshape(-1) for x, kind in own]
    angles = turned[:0] if frequency is None else of_token(frequency, dtype)
    sizes = cache.k.shape[1], heads, kv_heads, d
    softmax.append(*signals, turned, of_token(cache.length, torch.int64), angles, *sizes)
    if not cache.k.is_inference():
        torch.autograd.graph.increment_version(cache[:2])
    arrays = turned, *signals[3:], outputs.reshape(-1)
    strides, mask = (heads * d, kv_heads * d, kv_heads * d), mask._replace(start=cache.length)
    _step(arrays, strides, q[:, None], cache.k, mask)
    return y.to(q.dtype)


def _step(arrays: Any, strides: Any, q: Tensor, k: Tensor, mask: AttentionMask) -> None:
    """Run the kernel for few queries."""
    _run(softmax.step, arrays, strides, q, k, mask, mask.soft_cap or 0.0)


def _run(
    kernel: Any, arrays: Any, strides: Any, q: Tensor, k: Tensor, mask: Any, more: Any
) -> None:
    """Run a kernel over all rows and heads; strides: entries between tokens of q, k and v."""
    (batch, length, heads, d), slots, dtype = q.shape, k.shape[1], launch.working_dtype(q)
    start, slopes, windows, first, _ = mask
    numbers = (
        np.zeros(batch, np.int64) if start is None else of_token(start, torch.int64),
        np.zeros(heads, arrays[0].dtype) if slopes is None else flat(slopes, dtype),
        np.full(heads, softmax.EVERYTHING) if windows is None else flat(windows, torch.int64),
        None if first is None else flat(first, torch.int64),
    )
    arguments = (*arrays, *numbers, *strides, length, slots, heads, d, heads // k.shape[2])
    fan_out(kernel, (*arguments, more), batch * heads, 0.2 * batch * heads * length * slots * d)


def _read(dtype: torch.dtype, *signals: Tensor) -> list[tuple[NDArray[Any], int]]:
    """Queries, keys and values as they lie in memory, and the entries between their tokens."""
    return [strided(x.flatten(2), dtype) for x in signals]


def of_few(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Attention of few queries; here, ``first`` of the mask has one slot per row."""
    dtype = launch.working_dtype(q)
    y = torch.empty(q.shape, dtype=dtype, device="cpu")
    held = torch.bfloat16 if k.dtype is v.dtype is torch.bfloat16 else dtype
    signals, strides = zip(*_read(dtype, q), *_read(held, k, v), strict=True)
    arrays = *signals, y.numpy().reshape(-1)
    _step(arrays, strides, q, k, mask)
    return y.to(q.dtype)


def _with_norms(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """The output, and for each query log2 of the sum of the exponentials of its scores."""
    dtype = launch.working_dtype(q)
    if mask.plain and keys is None and _by_matrix_units(q, k, v):
        signals = (x.transpose(1, 2) for x in (q, k, v))
        y, norms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*signals, 0.0, True)
        return y.transpose(1, 2), norms * LOG2_E
    y = torch.empty(q.shape, dtype=dtype, device="cpu")
    norms = torch.empty((len(q), q.shape[2], q.shape[1]), dtype=dtype, device="cpu")
    signals, strides = zip(*_read(dtype, q, k, v), strict=True)
    arrays = *signals, flat(y, dtype), flat(norms, dtype)
    _run(softmax.forward, arrays, strides, q, k, mask, _of_distances(keys, dtype))
    return y, norms


def _of_distances(keys: Tensor | None, dtype: torch.dtype) -> Any:
    """Keys by distance as the kernels take them."""
    return None if keys is None else flat(keys, dtype)


class _Recorded(torch.autograd.Function):
    """Attention that saves its output and norms, so that the backward pass need not repeat it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, mask: AttentionMask
    ) -> Tensor:
        y, norms = _with_norms(q, k, v, keys, mask)
        ctx.save_for_backward(y, norms, q, k, v, keys, *mask[:-1])  # y in full precision
        return y.to(q.dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, norms, q, k, v, keys, *parts = ctx.saved_tensors
        mask = AttentionMask(*parts)
        dtype = launch.working_dtype(q)
        signals, strides = zip(*_read(dtype, q, k, v), strict=True)
        heads, kv_heads = q.shape[2], k.shape[2]
        shapes = [q.shape, *[(*x.shape[:2], heads, x.shape[3]) for x in (k, v)]]
        shapes += [] if keys is None else [(len(q) * heads, *keys.shape)]
        found = [torch.empty(shape, dtype=dtype, device="cpu") for shape in shapes]
        known = [flat(x, dtype) for x in (grad, y, norms, *found)]
        arrays = *signals, *known, *([None] if keys is None else ())
        _run(softmax.backward, arrays, strides, q, k, mask, _of_distances(keys, dtype))
        of_q, of_k, of_v, *of_keys = found
        if kv_heads < heads:
            of_k, of_v = (g.unflatten(2, (kv_heads, -1)).sum(dim=3) for g in (of_k, of_v))
        of_all = [g.to(q.dtype) for g in (of_q, of_k, of_v)]
        return *of_all, of_keys[0].sum(dim=0).to(keys.dtype) if of_keys else None, None
