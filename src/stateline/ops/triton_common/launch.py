"""The way from PyTorch's tensors to the kernels: checks of inputs, precision, memory, device."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import tensors_of, wants_gradient, wants_tangent

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("Triton needs a CUDA device (TRITON_INTERPRET=1 interprets it on the CPU)")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default, which Triton warns about
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter."""

PRECISION = {torch.float32: "ieee", torch.bfloat16: "tf32x3", torch.float16: "tf32x3"}
"""How kernels multiply matrices, by the dtype of the signals.

All operands are float32, and so are the states and the tables of a model's weights. One TF32
product would round them to eleven bits; the sum of three keeps nearly all. The interpreter always
multiplies in float32.
"""

DEVICE = "cpu" if INTERPRETED else "cuda"


def can_use(*inputs: Any) -> str:
    """Why kernels cannot take these inputs, or an empty string."""
    if wants_tangent():
        return "kernels compute no forward-mode derivatives"
    for x in tensors_of(inputs):
        if x.device.type != DEVICE:
            return f"these kernels run on {DEVICE}, not on {x.device.type}"
        if x.dtype not in (*PRECISION, torch.bool):
            return f"the kernels compute in float32, not in {x.dtype}"
        if not x.numel():
            return "a tensor is empty"
    return ""


def can_step(*inputs: Any) -> str:
    """Why a kernel for one token cannot take these inputs, or an empty string."""
    if wants_gradient(*inputs):
        return "the kernel of a step records no gradient"
    return can_use(*inputs)


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result. The interpreter cannot round to bfloat16, so there it is float32."""
    dtype = dtype or like.dtype
    if INTERPRETED and dtype == torch.bfloat16:
        dtype = torch.float32
    return torch.empty(shape, dtype=dtype, device=like.device)


def channels_first(*signals: Tensor) -> list[Tensor]:
    """The signals with equal strides and adjacent times: (row, channel, length).

    Signals that have this layout already are taken as they are, also as parts of a larger tensor.
    """
    strides = {x.stride() for x in signals}
    if len(strides) == 1 and signals[0].stride(2) == 1:
        return list(signals)
    return [x.contiguous() for x in signals]


def on(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the device of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@torch.compiler.assume_constant_result
@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that one program may use; the interpreter has no limit."""
    if INTERPRETED:
        return 1 << 40
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)


def round_up(n: int, least: int = 16) -> int:
    """The next power of two, at least the 16 rows or columns of the smallest matrix product."""
    return max(least, 1 << (n - 1).bit_length())
