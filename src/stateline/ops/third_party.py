"""Checks that the backends of third-party GPU kernels share."""

from typing import Any

import torch

from stateline.ops.dispatch import tensors_of

HALVES = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32, *HALVES)

DEVICE = "cuda"
"""Where these kernels run."""


def no_device() -> str:
    """Why none of them runs on this machine, or an empty string."""
    return "" if torch.cuda.is_available() else "there is no CUDA device"


def can_use(dtypes: tuple[torch.dtype, ...], *signals: Any) -> str:
    """Why a kernel cannot take these signals, or an empty string."""
    for x in tensors_of(signals):
        if x.device.type != DEVICE:
            return f"the kernel runs on {DEVICE}, not on {x.device.type}"
        if x.dtype not in dtypes:
            return f"the kernel is not exact enough in {x.dtype}, or does not take it"
        if not x.numel():
            return "a tensor is empty"
    return ""


FLA_MOST_WIDE = 256
"""Largest key and value of a head that flash-linear-attention's kernels take."""


def can_use_fla(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why flash-linear-attention cannot run a call on queries, keys and values, or an empty string.

    Its kernels multiply float32 as TF32, so that only half precision keeps our promise.
    """
    q, k, v = inputs[:3]
    if max(q.shape[-1], v.shape[-1]) > FLA_MOST_WIDE:
        return f"flash-linear-attention takes heads of up to {FLA_MOST_WIDE} entries"
    return can_use(HALVES, q, k, v)
