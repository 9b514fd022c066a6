"""Cache of values that depend on the parameters of a layer alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

LayerT = TypeVar("LayerT", bound=nn.Module)
T = TypeVar("T")
Memory = dict[tuple[nn.Module, str], Any]

_memory: ContextVar[Memory | None] = ContextVar("memory", default=None)


@contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """Cache derived values in ``memory``; the weights must not change meanwhile.

    Decoding uses this: a step of one token would otherwise spend most of its time on recomputing
    them.
    """
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def derived(method: Callable[[LayerT], T]) -> Callable[[LayerT], T]:
    """Mark a method whose result depends on the layer's parameters alone.

    The method runs at every call, but only once inside :func:`remembering` if gradients are off.

    Example:
        >>> class Doubled(nn.Linear):
        ...     @derived
        ...     def twice(self):
        ...         print("computed")
        ...         return 2 * self.weight
        >>> layer = Doubled(1, 1)
        >>> with torch.no_grad(), remembering({}):
        ...     first, second = layer.twice(), layer.twice()
        computed
    """

    @wraps(method)
    def run(layer: LayerT) -> T:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return method(layer)
        if (memory := _memory.get()) is None:
            return method(layer)
        key = (layer, method.__name__)
        if key not in memory:
            memory[key] = method(layer)
        return memory[key]

    return run
