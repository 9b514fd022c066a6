"""Short causal convolution, tap by tap, in GPU kernels compiled by Triton."""

from typing import Any

import torch
from torch import Tensor

from stateline.ops.kernel_op import KernelOp
from stateline.ops.short_conv import MOST_TAPS
from stateline.ops.short_conv import triton_kernel as filters
from stateline.ops.triton_common import launch, steps
from stateline.ops.triton_common.launch import empty, on

TIMES, WIDTH, PROGRAMS = 32, 64, 512
"""Tile of a program, and programs that keep a GPU busy."""


def can_use(function: str, *inputs: Any) -> str:
    """Why the kernels cannot run this call, or an empty string."""
    if function == "short_conv" and inputs[1].shape[1] > MOST_TAPS["cuda"]:
        return f"the Triton kernel takes up to {MOST_TAPS['cuda']} taps"
    return launch.can_use(*inputs)


def short_conv(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sum the delayed signals of the same document."""
    rows, length = u.reshape(-1, *u.shape[-2:]), u.shape[-2]
    numbers = None if starts is None else starts.reshape(-1, length).cumsum(1, dtype=torch.int32)
    return _by_taps(rows, kernel, numbers).reshape(*u.shape[:-1], len(kernel))


short_conv_stepper = steps.filter_stepper


def _grid(columns: int, length: int, rows: int) -> tuple[int, int, int]:
    return -(-columns // WIDTH), -(-length // TIMES), rows


def _run(
    u: Tensor, weights: Tensor, numbers: Tensor | None, channels: int, *, ahead: bool
) -> Tensor:
    (rows, length, _), (outputs, count) = u.shape, weights.shape
    columns = channels if ahead else outputs
    y = empty((rows, length, columns), u)
    with on(u):
        filters.short[_grid(columns, length, rows)](
            u, weights, y, u if numbers is None else numbers, length, channels, outputs,
            *u.stride(),
            COUNT=count, AHEAD=ahead, RESETS=numbers is not None, TIMES=TIMES, WIDTH=WIDTH,
        )  # fmt: skip
    return y.to(u.dtype)


def _forward(u: Tensor, kernel: Tensor, numbers: Tensor | None) -> Tensor:
    return _run(u, kernel.float().contiguous(), numbers, u.shape[2], ahead=False)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor, numbers: Tensor | None) -> Any:
    """Correlate the output gradient with the kernel and with the signal."""
    (rows, length, channels), (outputs, count) = u.shape, kernel.shape
    du = _run(grad, kernel.float().contiguous(), numbers, channels, ahead=True)
    blocks = -(-outputs // WIDTH)
    pieces = max(1, min(rows, PROGRAMS // (blocks * count)))
    sheets = empty((pieces, outputs, count), u, torch.float32)
    with on(u):
        filters.short_weights[(blocks, count, pieces)](
            grad.contiguous(), u, sheets, u if numbers is None else numbers,
            rows, length, channels, outputs, *u.stride(), pieces,
            COUNT=count, RESETS=numbers is not None, TIMES=TIMES, WIDTH=WIDTH,
        )  # fmt: skip
    return du, sheets.sum(dim=0)


_by_taps = KernelOp(
    "short_conv_triton",
    _forward,
    _backward,
    lambda u, kernel, _: u.new_empty(*u.shape[:2], len(kernel)),
)
