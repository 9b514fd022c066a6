"""The way from PyTorch's tensors to the kernels: arrays, threads, and checks of the inputs."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateline.ops.declared import FLOATS
from stateline.ops.dispatch import wants_gradient, wants_tangent

_TYPES = {torch.float32: "=f4", torch.float64: "=f8", torch.int64: "=i8", torch.bfloat16: "=u2"}
"""NumPy has no bfloat16: kernels get the bits."""


def can_use(*inputs: Any) -> str:
    """Why kernels cannot take these inputs, or an empty string."""
    if wants_tangent():
        return "kernels compute no forward-mode derivatives"
    for x in inputs:
        if isinstance(x, Tensor):
            if not x.is_cpu:
                return f"numba runs on the CPU, not on {x.device.type}"
            if x.dtype not in (*FLOATS, torch.bool):
                return f"numba takes floats, not {x.dtype}"
        elif isinstance(x, tuple) and (reason := can_use(*x)):
            return reason
    return ""


def can_step(*inputs: Any) -> str:
    """Why a kernel for one token cannot take these inputs, or an empty string."""
    if wants_gradient(*inputs):
        return "the numba step records no gradient"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the step itself"
    return can_use(*inputs)


def can_run(function: str, *inputs: Any) -> str:
    """Why an op's kernels cannot run this call, of sequences or of a step, or an empty string."""
    return can_step(*inputs) if function.endswith(("_step", "_step_")) else can_use(*inputs)


def working_dtype(*inputs: Tensor | None) -> torch.dtype:
    """The precision that kernels compute in: float64 if any input has it, else float32."""
    for x in inputs:  # called at every token: a loop takes half the time of a generator
        if x is not None and x.dtype is torch.float64:
            return torch.float64
    return torch.float32


def array(x: Tensor, dtype: torch.dtype, *, axes: bool = True) -> NDArray[Any]:
    """The entries of a tensor: without a copy if it is contiguous and of the dtype.

    Like ``x.numpy()``, which forbids resizing the storage: FSDP frees parameters so.
    """
    x = x.detach() if x.requires_grad else x
    if x.dtype is not dtype:
        x = x.to(dtype)
    shape = x.shape if axes else (x.numel(),)
    if not x.numel():  # an empty tensor is at address 0, which NumPy before 2.4 refuses
        return np.empty(shape, _TYPES[dtype])
    x = x.contiguous().resolve_neg()  # gradients of imaginary parts are negated lazily
    described = {
        "version": 3,
        "shape": shape,
        "typestr": _TYPES[dtype],
        "data": (x.data_ptr(), False),
    }
    # NumPy keeps the object, and it the tensor, so the memory lives as long as the array
    return np.asarray(SimpleNamespace(__array_interface__=described, tensor=x))


flat = partial(array, axes=False)
"""The same with a single axis."""


def strided(x: Tensor, dtype: torch.dtype) -> tuple[NDArray[Any], int]:
    """A signal (..., length, channel) as a flat array, and the entries from token to token.

    A slice of the last axis of a contiguous tensor is taken as it is: the array then holds what
    lies between its tokens, too.
    """
    read = array if x.requires_grad else of_token
    if x.dtype is dtype and x.is_contiguous():
        return read(x, dtype).reshape(-1), x.shape[-1]
    *batch, length, channels = x.shape
    stride = x.stride(-2)
    fits = x.dtype is dtype and x.numel() > 0 and x.stride(-1) == 1
    expected = length * stride
    for size, between in zip(reversed(batch), reversed(x.stride()[:-2]), strict=True):
        fits, expected = fits and between == expected, expected * size
    if not fits:
        return read(x, dtype).reshape(-1), channels
    size = (x.shape[:-1].numel() - 1) * stride + channels
    return read(x.detach().as_strided((size,), (1,)), dtype), stride


def of_token(x: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The entries of a signal without gradient: faster than :func:`array`; not for parameters."""
    if x.dtype is not dtype or x.requires_grad or x.is_neg():
        x = x.detach().to(dtype).resolve_neg()
    x = x.contiguous()
    entries: NDArray[Any] = (x.view(torch.uint16) if dtype is torch.bfloat16 else x).numpy()
    return entries


def output(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
    """An empty tensor, and its entries."""
    entries = np.empty(shape, _TYPES[dtype])
    y = torch.from_numpy(entries)
    return y.view(dtype) if dtype is torch.bfloat16 else y, entries


class Changing:
    """Arrays of states, whose changes reach the states; shapes and order of entries are kept.

    A class rather than a generator, because it is entered at every token of every layer.
    """

    __slots__ = ("held", "states")

    def __init__(self, dtype: torch.dtype, *states: Tensor) -> None:
        self.states = states
        self.held = [x.to(dtype).contiguous() for x in states]

    def __enter__(self) -> list[NDArray[Any]]:
        return [x.detach().numpy() for x in self.held]

    def __exit__(self, *_: object) -> None:
        for state, copy in zip(self.states, self.held, strict=True):
            if copy is not state:
                state.copy_(copy)
            elif not state.is_inference():
                torch.autograd.graph.increment_version(state)


LEAST_WORK = 5e5
"""Nanoseconds of work below which other threads cost more time than they save."""

_pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads
os.register_at_fork(after_in_child=_pools.clear)  # a child has none of its parent's threads


def fan_out(
    kernel: Callable[..., Any], arguments: tuple[Any, ...], tasks: int, work: int | float
) -> None:
    """Run all tasks on as many threads as PyTorch may use; little work runs on this thread alone.

    Args:
        kernel: Called with the arguments, the first task and the one after the last; does not hold
            the GIL. What a task computes must not depend on the other tasks of the call.
        arguments: The first arguments of each call.
        tasks: Number of tasks.
        work: About how many nanoseconds all of it takes on one thread.
    """
    threads = min(torch.get_num_threads(), tasks)
    if threads <= 1 or work < LEAST_WORK:
        kernel(*arguments, 0, tasks)
        return
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="stateline-kernels")
    pieces = min(tasks, 4 * threads)
    cuts = [tasks * i // pieces for i in range(pieces + 1)]
    turn = itertools.count()

    def run() -> None:
        while (i := next(turn)) < pieces:
            kernel(*arguments, cuts[i], cuts[i + 1])

    others = [_pools[threads].submit(run) for _ in range(threads - 1)]
    run()
    for other in others:
        other.result()


def step_in_place(
    kernel: Callable[..., Any],
    signals: Sequence[Tensor | None],
    state: Tensor,
    v: Tensor,
    work: float,
) -> Tensor:
    """The output for one token, with the shape and dtype of ``v``; the state changes in place.

    Args:
        kernel: Called with the signals, the state, the output, and the first and last row.
        signals: What the token brings; ``None`` is handed on.
        state: The state, row by row.
        v: The signal that the output is like.
        work: About how many nanoseconds an entry of the state takes.
    """
    dtype = working_dtype(state, *signals)
    y, outputs = output(v.shape, dtype)
    with Changing(dtype, state) as (s,):
        arrays = [None if x is None else of_token(x, dtype) for x in signals]
        fan_out(kernel, (*arrays, s, outputs), v.shape[0], s.size * work)
    return y.to(v.dtype)


def borders_of(shape: Sequence[int], starts: Tensor | None) -> NDArray[np.int64]:
    """Where each row begins, and the end; each document in a row counts as a row."""
    *axes, length = shape
    rows = math.prod(axes)
    if starts is None or not length:
        return np.arange(rows + 1) * length
    begins = starts.reshape(-1, length).numpy().copy()
    begins[:, :1] = True
    return np.append(np.flatnonzero(begins), rows * length)
