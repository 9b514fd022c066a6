"""Cache of values that depend on the parameters of a layer alone."""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

LayerT = TypeVar("LayerT", bound=nn.Module)
T = TypeVar("T")
Watch = Callable[[dict[str, Any], str], None]


class Memory:
    """Values derived from the weights of a model, kept as long as the weights do not change.

    The values own their memory: they are computed from copies of the weights. So a weight may be
    freed while they exist, as FSDP does after every call of a block.

    It watches the weights that a value was computed from, and the first weight of the model, which
    shows a cast or a move; with ``every``, all weights and buffers. A weight has changed if its
    tensor, its storage or a module above it was replaced (``.data``, a cast, a move), if PyTorch
    has counted a change in place, or if any optimizer has made a step since: fused optimizers
    change weights without counting. A change in place through ``.data`` or NumPy is not seen; call
    :meth:`forget` after one.
    """

    def __init__(self, model: nn.Module, *, every: bool = False) -> None:
        self._model, self._every, self._counted = model, every, _optimizer_steps()
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins empty and watches the copied model: weak references are not copied."""
        return partial(Memory, every=self._every), (self._model,)

    def renew(self) -> bool:
        """Forget the values if weights have changed, and return whether they have."""
        if self._unchanged():
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Drop all values."""
        modules = list(self._model.modules())
        self._values: dict[tuple[nn.Module, str], Any] = {}
        self._children = [m._modules for m in modules if m._modules]
        self._seen = [dict(table) for table in self._children]
        self._watched: dict[tuple[int, str], tuple[Any, ...]] = {}
        self._storages: list[StorageWeakRef] = []
        self._steps = self._counted[0]
        tables = [m._parameters for m in modules] + [m._buffers for m in modules]
        weights = [(table, name) for table in tables for name in table]
        for table, name in weights if self._every else weights[:1]:
            self._watch(table, name)

    def value(self, layer: LayerT, method: Callable[[LayerT], T]) -> T:
        """The result of a layer's method, computed at the first call."""
        key = (layer, method.__name__)
        if key not in self._values:
            self._values[key] = method(_twin(layer, self._watch))
        return self._values[key]

    def _watch(self, table: dict[str, Any], name: str) -> None:
        """Watch one tensor of a module's table, and do not keep it alive."""
        x = table[name]
        if x is None or (id(table), name) in self._watched:
            return
        storage = x.untyped_storage()
        # a weak reference, so that no other storage gets the same number
        self._storages.append(StorageWeakRef(storage))
        # inference tensors do not count changes
        version = None if x.is_inference() else x._version
        self._watched[id(table), name] = table, name, weakref.ref(x), storage._cdata, version

    def _unchanged(self) -> bool:
        """Whether modules, tensors, storages and counts of changes are the same.

        It runs at every token, and takes fractions of a microsecond per module and tensor.
        """
        if self._steps != self._counted[0] or self._children != self._seen:
            return False
        for table, name, reference, storage, version in self._watched.values():
            x = table.get(name)
            if x is None or x is not reference() or x.untyped_storage()._cdata != storage:
                return False
            if version is not None and x._version != version:
                return False
        return True


_memory: ContextVar[Memory | None] = ContextVar("memory", default=None)


class remembering:
    """Cache derived values in ``memory``; the weights must not change inside.

    Decoding uses this: a step of one token would otherwise spend most of its time on recomputing
    them. The ``with`` statement gives whether weights have changed since the last time, so that
    values are computed again.
    """

    __slots__ = ("_own", "_token")

    def __init__(self, memory: Memory) -> None:
        self._own = memory

    def __enter__(self) -> bool:
        changed = self._own.renew()
        self._token = _memory.set(self._own)
        return changed

    def __exit__(self, *_: object) -> None:
        _memory.reset(self._token)


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
    """Tensors of a module by name; every reader gets a copy."""

    def __init__(self, table: dict[str, Any], watch: Watch) -> None:
        super().__init__(table)
        self._table, self._watch = table, watch

    def __getitem__(self, name: str) -> Tensor | None:
        tensor = super().__getitem__(name)
        if tensor is None:
            return None
        self._watch(self._table, name)
        return tensor.detach().clone()

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


def _twin(module: LayerT, watch: Watch) -> LayerT:
    """The same module, except that whoever reads a parameter gets a copy of it.

    ``copy.copy`` would not do: the classes that FSDP makes cannot be constructed again.
    """
    children = module._modules.items()
    twin = object.__new__(type(module))
    twin.__dict__ = {
        **module.__dict__,
        "_parameters": _Copies(module._parameters, watch),
        "_buffers": _Copies(module._buffers, watch),
        "_modules": {name: child and _twin(child, watch) for name, child in children},
    }
    return twin


@cache
def _optimizer_steps() -> list[int]:
    """The number of steps of all optimizers since the first call."""
    steps = [0]

    def count(*_: object) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps
