"""Values that follow from a layer's parameters alone, computed once where they cannot change."""

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
    """Let layers keep derived values in ``memory``, whose owner sees to it that no weight changes.

    Decoding does: a step of one token would spend most of its time on computing them anew.
    """
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def derived(method: Callable[[LayerT], T]) -> Callable[[LayerT], T]:
    """Mark a method whose result follows from the layer's parameters alone.

    It is computed at every call, but inside :func:`remembering` and without gradients only once.

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
