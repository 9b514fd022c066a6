"""Linear maps by the library that multiplies faster on this processor.

PyTorch gives products in float32 to MKL, which uses AVX2 on processors of AMD. oneDNN, which is
part of PyTorch, too, uses AVX-512 there. On Zen 5, one thread, with 2,048 to 3,072 positions and
widths of 64 to 512, it is 2.2 to 2.4 times as fast in maps and gradients of inputs, and 1.5 to 1.9
times in gradients of weights; with AVX2 alone, 1.1 to 1.3 and 0.9 to 1.1 times.
``examples/linear_libraries.py`` compares them.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import wants_gradient, wants_tangent
from stateline.ops.kernel_op import is_plain

LEAST, LEAST_IN_HALVES = 1 << 21, 1 << 23
"""Multiplications below which finding oneDNN's kernel costs more than it saves.

The second limit is for processors that compute with AVX-512 in two halves, such as Zen 4, or with
AVX2 alone.
"""

POSITIONS, POSITIONS_IN_HALVES = 32, 256
"""With fewer rows of the input, oneDNN is slower than MKL, because it reorders the weight."""

BLOCK, WIDE, GROUP = 256, 1 << 19, 16
"""With one row less than a multiple of the first (a prompt of 512 tokens without its last), oneDNN
takes 1.1 to 1.3 times as long as with one more, if the weight has this many entries. In bfloat16,
some numbers of rows above the first number, such as 301, 505 and 511, take 1.1 to 1.4 times as long
as the next multiple of the last one."""


def linear(
    x: Float[Tensor, "*batch d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "*batch d_out"]:
    """Map the last axis, as ``torch.nn.functional.linear`` does.

    Example:
        >>> linear(torch.ones(2), torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))
        tensor([3.5000])
    """
    if torch.compiler.is_compiling():  # a size that is read would restrict the graph
        return F.linear(x, weight, bias)
    few = x.numel() * weight.shape[0] < LEAST  # the cheapest check first, for single tokens
    if few or not _is_eager(x, weight):
        return F.linear(x, weight, bias)
    if _is_uneven(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        whole = F.linear(F.pad(rows, (0, 0, 0, -len(rows) % GROUP)), weight, bias)
        return whole[: len(rows)].view(*x.shape[:-1], -1)
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if wants_gradient(x, weight, bias):
        y: Tensor = _Recorded.apply(x, weight, bias)
        return y
    return product(x, weight, bias)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rounds_products() -> bool:
    """Whether PyTorch may round factors of matrix products: TF32, or bfloat16 on a CPU.

    ``torch.get_float32_matmul_precision`` is an error where the newer settings were used, too.
    """
    exact, backends = ("none", "ieee"), torch.backends
    return not (
        backends.fp32_precision in exact  # type: ignore[attr-defined]
        and backends.cuda.matmul.fp32_precision in exact
        and backends.mkldnn.matmul.fp32_precision in exact  # type: ignore[attr-defined]
    )


def is_small(x: Tensor, d_out: int, positions: int, least: int) -> bool:
    """Whether a map to ``d_out`` entries is too small for another library or a kernel."""
    entries = x.numel()
    return entries < positions * x.shape[-1] or entries * d_out < least


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The map; by oneDNN, without a gradient."""
    if _by_onednn(x, weight) and not wants_gradient(x, weight, bias):
        rows = x.numel() // x.shape[-1]
        if rows % BLOCK != BLOCK - 1 or weight.numel() < WIDE:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return y
        whole = F.pad(x.reshape(rows, -1), (0, 0, 0, 1))
        return product(whole, weight, bias)[:rows].view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weight, from the gradient of the output and the input (row per position).

    The factor with fewer columns is the first one: oneDNN copies it. If the second one is a slice,
    oneDNN takes 400 times as long.
    """
    if grad.shape[1] > x.shape[1]:
        return _transposed_product(x, grad).T
    return _transposed_product(grad, x)


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a, multiplied by b; with AVX2 alone, oneDNN's copy costs what it gains."""
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return a.T @ b
    return product(a.T, b.contiguous().T)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(grad, weight.T) if of_x else None,
            weight_gradient(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies a matrix by the transpose of another one."""
    return (
        x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and mkl_is_slower()
        and not is_small(x, weight.shape[0], *_limits())
    )


def _is_uneven(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN may be slow for this number of rows, in bfloat16 and without a gradient."""
    rows = x.numel() // x.shape[-1]
    slow = x.dtype is torch.bfloat16 and x.is_cpu and rows % GROUP and rows > BLOCK
    return bool(slow) and weight.numel() >= WIDE and not wants_gradient(x, weight)


def _is_eager(x: Tensor, weight: Tensor) -> bool:
    """Whether autocast, functorch transforms, tangents and tensor subclasses are all absent."""
    wanted = torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active()
    return not (wanted or wants_tangent()) and is_plain(x) and is_plain(weight)


@cache
def mkl_is_slower() -> bool:
    """Whether this is a processor of AMD, and PyTorch has both libraries."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "AuthenticAMD" in _about_processor()
    )


@cache
def _limits() -> tuple[int, int]:
    """Positions and multiplications below which MKL serves.

    Of AMD's processors with AVX-512, those without AVX-VNNI compute with it in two halves.
    """
    avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    halves = avx2 or "avx_vnni" not in _about_processor()
    return (POSITIONS_IN_HALVES, LEAST_IN_HALVES) if halves else (POSITIONS, LEAST)


@cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies matrices in bfloat16 by units of their own (AMX)."""
    return "amx_bf16" in _about_processor()


def _about_processor() -> str:
    about = Path("/proc/cpuinfo")
    return about.read_text() if about.exists() else ""
