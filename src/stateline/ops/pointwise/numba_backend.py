"""Functions of single positions, each in one pass over memory: in numba.

To read the weight of a map, MKL takes 1.4 to 3 times as long on processors of AMD, and oneDNN in
bfloat16 twice as long as the kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import tensors_of, wants_gradient
from stateline.ops.kernel_op import is_plain, once
from stateline.ops.linear import is_small, linear, mkl_is_slower, product, weight_gradient
from stateline.ops.numba_common import launch
from stateline.ops.numba_common.launch import (
    LEAST_WORK,
    fan_out,
    flat,
    of_token,
    output,
    strided,
    working_dtype,
)
from stateline.ops.pointwise import READ, FeedForwardWeights
from stateline.ops.pointwise.numba_kernel import (
    ROWS,
    gate,
    gate_backward,
    gelu_of_sum,
    multiply,
    normalise,
    normalise_backward,
    turn,
)

POSITIONS, LEAST = 32, 1 << 20
"""Positions, and multiplications of a map, below which kernels gain nothing without gradients."""


FEW, BYTES = 4, 10
"""Rows up to which reading the weight is the time of a map, and bytes that a thread reads in a
nanosecond."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    x = inputs[0]
    tensors = list(tensors_of(inputs))
    if torch.compiler.is_compiling() or not all(map(is_plain, tensors)):
        return "compiled functions and sharded tensors take PyTorch's operators"
    kinds = {t.dtype for t in tensors}
    if function == "feed_forward" and x.is_cpu and (lower := _lowered()):
        kinds = {lower if kind is torch.float32 else kind for kind in kinds}
    if function == "rotary" and x.dtype is torch.bfloat16:
        kinds = {inputs[1].dtype} - {torch.float32} | {x.dtype}
    if len(kinds) > 1 or not kinds <= _PRECISIONS:
        return "the numba kernels take one precision: float32, float64 or bfloat16"
    if function == "linear_stepper" and (x.dtype is torch.float64 or not x.is_contiguous()):
        return "the numba kernel reads the rows of a weight in float32 or bfloat16"
    if function == "rotary" and wants_gradient(*inputs[1:]):
        return "the numba kernel gives no gradient to angles"
    return launch.can_use(*inputs)


_PRECISIONS = {torch.float32, torch.float64, torch.bfloat16}


def _lowered() -> torch.dtype | None:
    """What autocast, if it is on, lowers float32 to in matrix products."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def gains(function: str, *inputs: Any) -> bool:
    """Whether a call is faster here: without a gradient, not on few positions."""
    if function == "linear_stepper":
        weight = inputs[0]
        return weight.numel() >= READ and (weight.dtype is torch.bfloat16 or mkl_is_slower())
    if function == "rotary" or wants_gradient(*inputs):
        return True
    if function != "feed_forward":
        return inputs[0].numel() >= POSITIONS * inputs[0].shape[-1]
    return not is_small(inputs[0], len(inputs[1].w_in), POSITIONS, LEAST)


def linear_stepper(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Read each row of the weight once for all rows of the input; sums are in float32.

    More rows, gradients and autocast are left to PyTorch, and small maps on several threads, too,
    which it starts sooner.
    """
    (d_out, d_in), work = weight.shape, weight.nbytes / BYTES
    entries = flat(weight, weight.dtype)

    def step(x: Tensor) -> Tensor:
        dtype, threads = x.dtype, torch.get_num_threads()
        few = x.shape[-1] == d_in and x.numel() <= FEW * d_in and dtype is weight.dtype
        apart = threads > 1 and work < threads * LEAST_WORK
        if not few or apart or torch.is_autocast_enabled("cpu") or wants_gradient(x, weight):
            return linear(x, weight, bias)
        y, outputs = output((x.numel() // d_in, d_out), torch.float32)
        rows = of_token(x, torch.float32).reshape(-1)
        fan_out(multiply, (rows, entries, outputs), d_out, work)
        if bias is not None:
            y += bias
        return y.to(dtype).view(*x.shape[:-1], d_out)

    return step


def feed_forward(x: Tensor, weights: FeedForwardWeights) -> Tensor:
    """Bias, GELU and its derivative in one pass.

    The derivative, kept in place of the input of GELU, spares the backward pass the exponentials.
    """
    given: tuple[Tensor, ...] = (x.reshape(-1, x.shape[-1]), *weights)
    if (lower := _lowered()) and x.dtype is not torch.float64:
        given = tuple(part.to(lower) for part in given)
    y: Tensor = _FeedForward.apply(*given)
    return y.view(*x.shape[:-1], len(weights.w_out))


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor
    ) -> Tensor:
        h = product(x, w_in)
        z, outputs = output(h.shape, h.dtype)
        entries = flat(h, h.dtype), flat(b_in, working_dtype(h)), outputs.reshape(-1)
        fan_out(gelu_of_sum, entries, *_work(h))
        ctx.save_for_backward(x, z, h, w_in, w_out)  # h holds the derivative now
        return product(z, w_out, b_out)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, z, slope, w_in, w_out = ctx.saved_tensors
        of_x, of_w_in, of_b_in, of_w_out, of_b_out = ctx.needs_input_grad
        of_h = product(grad, w_out.T).mul_(slope)
        return (
            product(of_h, w_in.T) if of_x else None,
            weight_gradient(of_h, x) if of_w_in else None,
            of_h.sum(0) if of_b_in else None,
            weight_gradient(grad, z) if of_w_out else None,
            grad.sum(0) if of_b_out else None,
        )


def swiglu(h: Tensor) -> Tensor:
    """Read both halves once; the backward pass computes the gate again."""
    y: Tensor = _SwiGLU.apply(h)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        y, outputs = output((*h.shape[:-1], h.shape[-1] // 2), h.dtype)
        fan_out(gate, (flat(h, h.dtype), outputs.reshape(-1), y.shape[-1]), *_work(y))
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        found, outputs = output(h.shape, h.dtype)
        arrays = flat(h, h.dtype), flat(grad, h.dtype), outputs.reshape(-1)
        fan_out(gate_backward, (*arrays, grad.shape[-1]), *_work(grad))
        return (found,)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Read each row twice while it is in the cache; keep nothing but the input."""
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y, outputs = output(x.shape, x.dtype)
        arrays = flat(x, x.dtype), flat(weight, working_dtype(x)), outputs.reshape(-1)
        fan_out(normalise, (*arrays, eps), *_work(x))
        return y

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        found, outputs = output(x.shape, x.dtype)
        rows, work = _work(x)
        dtype = working_dtype(x)
        of_weight, parts = output((-(-rows // ROWS), len(weight)), dtype)
        given = flat(x, x.dtype), flat(weight, dtype), flat(grad, x.dtype), outputs.reshape(-1)
        fan_out(normalise_backward, (*given, parts, ctx.eps), len(parts), work)
        return found, of_weight.sum(0).to(weight.dtype), None


def _work(x: Tensor) -> tuple[int, float]:
    """The number of positions, and nanoseconds for all of them."""
    return x.shape[:-1].numel(), 1.5 * x.numel()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Read a pair, write the rotated one."""
    if not wants_gradient(x):
        return _turned(x, cos, sin, 1)
    y: Tensor = _Rotary.apply(x, cos, sin)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    batch, length, heads, d = x.shape
    y, outputs = output(x.shape, x.dtype)
    signal, stride = strided(x.flatten(-2), x.dtype)
    angles = (of_token(part, working_dtype(x)).reshape(-1) for part in (cos, sin))
    arrays = signal, outputs.reshape(-1), *angles
    sizes = length, heads, d, cos.shape[-1], stride, len(cos) > 1, sign
    fan_out(turn, (*arrays, *sizes), batch * length, x.numel() * 1.0)
    return y
