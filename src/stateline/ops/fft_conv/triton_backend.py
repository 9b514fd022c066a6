"""Causal convolution by matrix products on a GPU, in kernels compiled by Triton.

Up to ``ONE_LEVEL`` points a row never leaves the multiprocessor between the transforms. More points
take one level more, through memory. Beyond ``MOST_POINTS`` the kernel and the signal are cut, and
the parts of the output are added.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.fft_conv import triton_kernel as fourier
from stateline.ops.kernel_op import KernelOp
from stateline.ops.triton_common import launch
from stateline.ops.triton_common.launch import channels_first, empty, on

ONE_LEVEL = 4096
"""Largest transform whose matrices fit into the memory of a multiprocessor."""

MOST_POINTS = 64 * ONE_LEVEL
"""Largest transform with one level more: it has at most 64 lines."""

WIDTH = 64
"""Columns of a program that spreads or gathers lines."""

FEW_POINTS, SHARED = 1024, 131_072
"""Bytes of a multiprocessor's memory that longer transforms need, by Triton's compiler."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    u, kernel = inputs
    if reason := launch.can_use(u, kernel):
        return reason
    needed = u.shape[-2] + min(kernel.shape[1], u.shape[-2]) - 1
    if needed > FEW_POINTS and launch.shared_memory(u.device) < SHARED:
        return f"the Triton kernel needs {SHARED} bytes of shared memory per multiprocessor"
    return ""


def fft_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """Transform, multiply, transform back."""
    length, channels = u.shape[-2:]
    signal = u.reshape(-1, length, channels).mT
    y = _in_parts(signal, kernel[:, :length])
    return y.mT.reshape(*u.shape[:-1], len(kernel))


def _in_parts(u: Tensor, kernel: Tensor) -> Tensor:
    """Cut the kernel into parts, whose outputs come later, and the signal, where parts overlap."""
    length, taps, part = u.shape[2], kernel.shape[1], MOST_POINTS // 4
    if length + taps - 1 <= MOST_POINTS:
        return _convolve(u, kernel)
    if taps > part:
        late = _in_parts(u[..., : length - part], kernel[:, part:])
        return _in_parts(u, kernel[:, :part]) + F.pad(late, (part, 0))
    size, early = MOST_POINTS - taps + 1, taps - 1  # of a part, and of its overlap
    outputs = [_convolve(u[..., :size], kernel)]
    for start in range(size, length, size - early):
        later = _convolve(u[..., start - early : start - early + size], kernel)
        outputs.append(later[..., early:])
    return torch.cat(outputs, dim=2)


def _sizes(length: int, taps: int) -> tuple[int, int, int]:
    """Number of lines, and the factors of the points of a line: powers of two, at least 16."""
    points = launch.round_up(length + taps - 1, least=256)
    lines = 1 if points <= ONE_LEVEL else max(16, points // ONE_LEVEL)
    second = 1 << ((points // lines).bit_length() - 1) // 2
    return lines, points // lines // second, second


@cache
def _constants(one: int, two: int, device: torch.device, *, second: bool = True) -> Tensor:
    """Fourier matrices and twiddle factors as planes, one after the other, from float64.

    Without ``second``, the matrix of the second factor is left out.
    """
    planes = []
    tables = [(one, one, one), (one, two, one * two), (two, two, two)]
    for rows, columns, points in tables if second else tables[:2]:
        index = torch.arange(rows)[:, None] * torch.arange(columns) % points
        angle = -2 * math.pi / points * index.double()
        planes += [angle.cos().flatten(), angle.sin().flatten()]
    return torch.cat(planes).float().to(device)


def _spectrum(kernel: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """Spectrum of the kernels over the number of points: (output, 2, line, N1, N2)."""
    spectrum = torch.fft.fft(kernel.float(), n=math.prod(sizes), norm="forward")
    planes = torch.stack([spectrum.real, spectrum.imag], dim=1)
    return planes.unflatten(2, sizes[::-1]).transpose(2, 4).contiguous()


def _run(u: Tensor, kernel: Tensor, shape: tuple[int, ...], *, conjugate: bool) -> Tensor:
    """Convolve, or correlate; inf and NaN stay in their row and reach no earlier output."""
    sizes, y = _sizes(u.shape[2], kernel.shape[1]), empty(shape, u)
    wrong = ~u.isfinite()
    lines, outputs = _lines(u.masked_fill(wrong, 0), sizes), len(kernel)
    rows, channels, length = lines.shape
    several = sizes[0] > 1
    found = empty((rows, outputs, length), u, torch.float32) if several else y
    with on(u):
        fourier.convolve[(outputs, sizes[0], -(-rows // 2))](
            lines, _spectrum(kernel, sizes), _constants(*sizes[1:], u.device), found, rows,
            length // sizes[0], channels, outputs, *lines.stride()[:2], conjugate,
            **_compiled(sizes, u),
        )  # fmt: skip
    if several:
        _gather(found, y, sizes, u.dtype)
    reached = (wrong.flip(2) if conjugate else wrong).cumsum(2, dtype=torch.int32) > 0
    reached = reached.flip(2) if conjugate else reached.repeat(1, outputs // u.shape[1], 1)
    return y.masked_fill_(reached, torch.nan)


def _lines(u: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """A signal that is a single line, or the lines of its pairs of rows (row, channel, points)."""
    (u,) = channels_first(u)
    (rows, channels, length), (count, *inner) = u.shape, sizes
    if count == 1:
        return u
    lines = empty((rows + rows % 2, channels, math.prod(sizes)), u, torch.float32)
    points = math.prod(inner)
    with on(u):
        fourier.spread[(len(lines) // 2 * channels, points // WIDTH)](
            u, _constants(count, points, u.device, second=False), lines, rows, length, channels,
            *u.stride()[:2], M=points, WIDTH=WIDTH, N1=count, PRECISION=launch.PRECISION[u.dtype],
        )  # fmt: skip
    return lines


def _gather(lines: Tensor, y: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Write the signals (row, output, length) of all lines."""
    (rows, outputs, length), count, points = y.shape, sizes[0], math.prod(sizes[1:])
    with on(y):
        fourier.gather[(len(lines) // 2 * outputs, points // WIDTH)](
            lines, _constants(count, points, y.device, second=False), y, rows, length, outputs,
            M=points, WIDTH=WIDTH, N1=count, PRECISION=launch.PRECISION[dtype],
        )  # fmt: skip


def _compiled(sizes: tuple[int, int, int], u: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for."""
    precision = launch.PRECISION[u.dtype]
    warps = 4 if sizes[1] <= 32 else 8
    return {"N1": sizes[1], "N2": sizes[2], "PRECISION": precision, "num_warps": warps}


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    shape = len(u), len(kernel), u.shape[2]
    return _run(u, kernel, shape, conjugate=False).to(u.dtype)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate the output gradient with the kernel and with the signal."""
    outputs, grad, sizes = len(kernel), grad.contiguous(), _sizes(u.shape[2], kernel.shape[1])
    du = _run(grad, kernel, grad.shape, conjugate=True)
    if outputs > u.shape[1]:
        du = du.float().unflatten(1, (-1, u.shape[1])).sum(dim=1)
    lines, grads = _lines(u, sizes), _lines(grad, sizes)
    rows, channels, length = lines.shape
    dkernel = empty((1, *kernel.shape), kernel, torch.float32)
    several = sizes[0] > 1
    found = empty((2, outputs, length), kernel, torch.float32) if several else dkernel
    with on(u):
        fourier.correlate[(outputs, sizes[0])](
            lines, grads, _constants(*sizes[1:], u.device), found, rows, length // sizes[0],
            found.shape[2] // sizes[0], 1 / math.prod(sizes), channels, outputs,
            *lines.stride()[:2], several, **_compiled(sizes, u),
        )  # fmt: skip
    if several:
        _gather(found, dkernel, sizes, u.dtype)
    return du, dkernel[0]


_convolve = KernelOp(
    "fft_conv_kernel",
    _forward,
    _backward,
    lambda u, kernel: u.new_empty(len(u), len(kernel), u.shape[2]),
)
