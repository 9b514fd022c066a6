"""What the backends of third-party GPU kernels share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateline.ops.dispatch import tensors_of

HALVES = (torch.bfloat16, torch.float16)
SINGLE = (torch.float32, *HALVES)

DEVICE = "cuda"
"""Where these kernels run."""


def no_device() -> str:
    """Why none of these kernels runs on this machine, or an empty string."""
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

    Its kernels multiply float32 as TF32, so only half precision meets our error limits.
    """
    x = inputs[0]
    if max(x.q.shape[-1], x.v.shape[-1]) > FLA_MOST_WIDE:
        return f"flash-linear-attention takes heads of up to {FLA_MOST_WIDE} entries"
    return can_use(HALVES, x.q, x.k, x.v)


def run_fla(
    run: Callable[..., tuple[Tensor, Tensor]],
    state: Tensor,
    starts: Tensor | None,
    **signals: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run one of flash-linear-attention's kernels; queries are not scaled.

    The kernel gets documents as the sequences of one long row (``cu_seqlens``), each with its own
    state.
    """
    v, own, options = signals["v"], state.float(), {"scale": 1.0, "output_final_state": True}
    assert v is not None
    if starts is None:
        y, after = run(**signals, initial_state=own, **options)
        return y.to(v.dtype), after.to(state.dtype)
    begins, length = starts.clone(), starts.shape[1]
    begins[:, 0] = True
    places = begins.flatten().nonzero().flatten()
    rows, goes_on = places // length, ~starts.flatten()[places]
    one_row = {name: None if x is None else x.flatten(0, 1)[None] for name, x in signals.items()}
    ends = places.new_tensor([starts.numel()])
    y, after = run(
        **one_row,
        initial_state=own[rows] * goes_on[:, None, None, None],
        cu_seqlens=torch.cat([places, ends]),
        **options,
    )
    last = begins.sum(1).cumsum(0) - 1
    return y.view(v.shape).to(v.dtype), after[last].to(state.dtype)
