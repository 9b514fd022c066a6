"""Distributes a kernel's tasks over at most as many threads as PyTorch uses."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LEAST_WORK = 5e5
"""Nanoseconds of work below which handing over to other threads does not pay."""

_pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads
os.register_at_fork(after_in_child=_pools.clear)  # a child has none of its parent's threads


def fan_out(
    kernel: Callable[..., Any], arguments: tuple[Any, ...], tasks: int, work: int | float
) -> None:
    """Run all tasks on as many threads as PyTorch may use; little work, on this thread alone.

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
