"""Cache of values that depend on the parameters of a layer alone."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

LayerT = TypeVar("LayerT", bound=nn.Module)
T = TypeVar("T")


class Memory:
    """Values derived from the weights of a model, for as long as these stay as they are.

    The values own their memory: they are computed from copies of the weights. So a weight may be
    freed while they live, as FSDP does after every call of a block.

    A weight has changed if its tensor or a module above it was replaced, if its storage was
    (``.data``, a cast, a move), if PyTorch has counted a change in place, or if any optimizer has
    made a step since: fused optimizers change weights without counting. A change in place through
    ``.data`` or NumPy is not seen; :meth:`forget` the values after one.

    Args:
        model: The model; changes of any of its weights drop all values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[tuple[nn.Module, str], Any] = {}
        self._seen = _Weights(model)

    def renew(self) -> bool:
        """Forget the values if weights have changed, and return whether they have."""
        if self._seen.unchanged():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._seen = _Weights(self._model)

    def value(self, layer: LayerT, method: Callable[[LayerT], T]) -> T:
        """The result of a layer's method, computed at the first call."""
        key = (layer, method.__name__)
        if key not in self._values:
            self._values[key] = method(_twin(layer))
        result: T = self._values[key]
        return result


_memory: ContextVar[Memory | None] = ContextVar("memory", default=None)


@contextmanager
def remembering(memory: Memory) -> Iterator[bool]:
    """Cache derived values in ``memory``; the weights must not change inside.

    Decoding uses this: a step of one token would otherwise spend most of its time on recomputing
    them.

    Yields:
        Whether weights have changed since the last time, so that values are computed anew.
    """
    changed = memory.renew()
    token = _memory.set(memory)
    try:
        yield changed
    finally:
        _memory.reset(token)


def derived(method: Callable[[LayerT], T]) -> Callable[[LayerT], T]:
    """Mark a method whose result depends on the parameters and buffers of the layer alone.

    The method runs at every call, but only once inside :func:`remembering` if gradients are off.

    Example:
        >>> class Doubled(nn.Linear):
        ...     @derived
        ...     def twice(self):
        ...         print("computed")
        ...         return 2 * self.weight
        >>> layer = Doubled(1, 1)
        >>> with torch.no_grad(), remembering(Memory(layer)):
        ...     first, second = layer.twice(), layer.twice()
        computed
    """

    @wraps(method)
    def run(layer: LayerT) -> T:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return method(layer)
        if (memory := _memory.get()) is None or isinstance(layer._parameters, _Copies):
            return method(layer)
        return memory.value(layer, method)

    return run


class _Copies(dict[str, Any]):
    """Tensors of a module by name, of which every reader gets a copy."""

    def __getitem__(self, name: str) -> Tensor | None:
        tensor = super().__getitem__(name)
        return None if tensor is None else tensor.detach().clone()


def _twin(module: LayerT) -> LayerT:
    """The same module, except that everybody who reads its parameters gets a copy of them.

    ``copy.copy`` would not do: the classes that FSDP makes cannot be constructed again.
    """
    twin = object.__new__(type(module))
    twin.__dict__ = {
        **module.__dict__,
        "_parameters": _Copies(module._parameters),
        "_buffers": _Copies(module._buffers),
        "_modules": {name: child and _twin(child) for name, child in module._modules.items()},
    }
    return twin


class _Entry(NamedTuple):
    """A tensor of a module as it was."""

    table: Mapping[str, Any]
    name: str
    tensor: weakref.ref[Tensor]
    version: int
    storage: int


class _Weights:
    """What shows whether the weights of a model have changed; it does not keep them alive."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [(m._modules, [*m._modules.values()]) for m in modules if m._modules]
        tables = [table for m in modules for table in (m._parameters, m._buffers)]
        self._entries = [_entry(t, n, x) for t in tables for n, x in t.items() if x is not None]
        found = (entry.tensor() for entry in self._entries)
        # weak references, so that no other storage gets the same number
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in found if x is not None]
        self._steps = _optimizer_steps()[0]

    def unchanged(self) -> bool:
        """Whether modules, tensors, storages and counts of changes are the same."""
        if self._steps != _optimizer_steps()[0]:
            return False
        if any(seen != [*table.values()] for table, seen in self._children):
            return False
        for table, name, tensor, version, storage in self._entries:
            x = tensor()
            if x is None or id(table.get(name)) != id(x):
                return False
            if x.untyped_storage()._cdata != storage or _version(x) != version:
                return False
        return True


def _entry(table: Mapping[str, Any], name: str, x: Tensor) -> _Entry:
    return _Entry(table, name, weakref.ref(x), _version(x), x.untyped_storage()._cdata)


def _version(x: Tensor) -> int:
    """The number of changes in place, which inference tensors do not have."""
    return 0 if x.is_inference() else x._version


@cache
def _optimizer_steps() -> list[int]:
    """The number of steps of all optimizers since the first call."""
    steps = [0]

    def count(*_: object) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps
