"""Causal convolution by matrix products on a GPU, in kernels compiled by Triton."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stateline.ops.numba_kernels.tensors import define_kernel_op, empty_like
from stateline.ops.triton_kernels import fourier, launch
from stateline.ops.triton_kernels.launch import channels_first, empty, on

MOST_POINTS = 4096
"""Largest transform whose matrices fit into the memory of a multiprocessor."""

FEW_POINTS, SHARED = 1024, 131_072
"""More points than these need so many bytes of a multiprocessor's memory, by Triton's compiler."""


def can_use(function: str, *inputs: Any) -> str:  # noqa: ARG001
    """Why the kernels cannot run this call, or an empty string."""
    u, kernel = inputs
    if reason := launch.can_use(u, kernel):
        return reason
    needed = u.shape[-2] + min(kernel.shape[1], u.shape[-2]) - 1
    if needed > MOST_POINTS:
        return f"the Triton kernel transforms up to {MOST_POINTS} points"
    if needed > FEW_POINTS and launch.shared_memory(u.device) < SHARED:
        return f"the Triton kernel needs {SHARED} bytes of shared memory per multiprocessor"
    return ""


def fft_conv(u: Tensor, kernel: Tensor) -> Tensor:
    """Transform, multiply, transform back."""
    length, channels = u.shape[-2:]
    signal = u.reshape(-1, length, channels).mT
    y = _convolve(signal, kernel[:, :length])
    return y.mT.reshape(*u.shape[:-1], len(kernel))


def _sizes(length: int, taps: int) -> tuple[int, int]:
    """Factors of the number of points: powers of two, at least 16."""
    points = launch.round_up(length + taps - 1, least=256)
    second = 1 << (points.bit_length() - 1) // 2
    return points // second, second


@cache
def _constants(sizes: tuple[int, int], device: torch.device) -> Tensor:
    """Fourier matrices and twiddle factors as planes, one after the other, from float64."""
    one, two = sizes
    planes = []
    for rows, columns, points in ((one, one, one), (one, two, one * two), (two, two, two)):
        index = torch.arange(rows)[:, None] * torch.arange(columns) % points
        angle = -2 * math.pi / points * index.double()
        planes += [angle.cos().flatten(), angle.sin().flatten()]
    return torch.cat(planes).float().to(device)


def _spectrum(kernel: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Spectrum of the kernels over N1 N2, in the order of the kernels: (output, 2, N1, N2)."""
    points = sizes[0] * sizes[1]
    spectrum = torch.fft.fft(kernel.float(), n=points, norm="forward")
    planes = torch.stack([spectrum.real, spectrum.imag], dim=1)
    return planes.unflatten(2, sizes[::-1]).mT.contiguous()


def _run(u: Tensor, kernel: Tensor, shape: tuple[int, ...], *, conjugate: bool) -> Tensor:
    (u,) = channels_first(u)
    rows, channels, length = u.shape
    sizes = _sizes(length, kernel.shape[1])
    y = empty(shape, u)
    with on(u):
        fourier.convolve[(len(kernel), -(-rows // 2))](
            u, _spectrum(kernel, sizes), _constants(sizes, u.device), y, rows, length, channels,
            len(kernel), *u.stride()[:2], conjugate, **_compiled(sizes, u),
        )  # fmt: skip
    return y


def _compiled(sizes: tuple[int, int], u: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for."""
    precision = launch.PRECISION[u.dtype]
    warps = 4 if sizes[0] <= 32 else 8
    return {"N1": sizes[0], "N2": sizes[1], "PRECISION": precision, "num_warps": warps}


def _forward(u: Tensor, kernel: Tensor) -> Tensor:
    shape = len(u), len(kernel), u.shape[2]
    return _run(u, kernel, shape, conjugate=False).to(u.dtype)


def _backward(grad: Tensor, u: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Correlate the output gradient with the kernel and with the signal."""
    (signal,), grad = channels_first(u), grad.contiguous()
    rows, channels, length = signal.shape
    outputs, taps = kernel.shape
    du = _run(grad, kernel, grad.shape, conjugate=True)
    if outputs > channels:
        du = du.float().unflatten(1, (-1, channels)).sum(dim=1)
    sizes = _sizes(length, taps)
    dkernel = empty(kernel.shape, kernel, torch.float32)
    with on(u):
        fourier.correlate[(outputs,)](
            signal, grad, _constants(sizes, u.device), dkernel, rows, length, taps,
            1 / (sizes[0] * sizes[1]), channels, outputs, *signal.stride()[:2],
            **_compiled(sizes, u),
        )  # fmt: skip
    return du.to(u.dtype), dkernel.to(kernel.dtype)


_convolve = define_kernel_op(
    "fft_conv_kernel",
    _forward,
    _backward,
    lambda u, kernel: u.new_empty(len(u), len(kernel), u.shape[2]),
    lambda _grad, *inputs: empty_like(*inputs),
)
