"""Decoding: what follows from the weights is computed once, and the steps change the state."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import repeat
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from stateline.layers.calls import VERBS, call, check_call, takes_starts
from stateline.layers.weights import Weights

LayerT = TypeVar("LayerT", bound=Any)
T = TypeVar("T")


def prepared(method: Callable[[LayerT], T]) -> Callable[[LayerT], T]:
    """Mark a method whose result follows from the settings and weights of its module alone.

    A :class:`Decoder` calls it once. A property may be marked, too, below ``@property``.

    Example:
        >>> class Doubled(nn.Linear):
        ...     @prepared
        ...     def twice(self):
        ...         print("computed")
        ...         return 2 * self.weight
        >>> layer = ready(Doubled(1, 1))
        >>> first, second = layer.twice(), layer.twice()
        computed
    """
    method.prepared = True  # type: ignore[attr-defined]
    return method


class Decoder(Generic[LayerT]):
    """Decodes with one set of weights: those that the layer has when it is made or refreshed.

    Methods marked as :func:`prepared` run once, and the modules inside call each other without
    checks and without looking for hooks that are not there.

    Between two calls of :meth:`step_` the weights are looked at, within microseconds: if a tensor
    or a module was replaced, or PyTorch has counted a change, the new weights are prepared. Changes
    that nobody counts (see :class:`~stateline.layers.weights.Weights`) are found by
    :meth:`changed`; :meth:`refresh` prepares the weights in any case.

    Args:
        layer: A sequence layer or a model.

    Attributes:
        layer: The layer.
        ready: The same layer with its weights prepared. It shares the parameters of the layer, and
            is only to be called.

    Example:
        >>> from stateline.layers import H3
        >>> layer = H3(8)
        >>> decoder, state = layer.decoder(), layer.init_state(2, capacity=1)
        >>> decoder.step_(torch.zeros(2, 8), state).shape
        torch.Size([2, 8])
    """

    ready: LayerT

    def __init__(self, layer: LayerT) -> None:
        self.layer = layer
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy prepares the weights of the copied layer."""
        return Decoder, (self.layer,)

    def refresh(self) -> None:
        """Prepare the present weights."""
        self._weights, self.ready = Weights(self.layer), ready(self.layer)

    def is_stale(self) -> bool:
        """Whether weights were replaced or changed in a way that PyTorch counts."""
        return self._weights.replaced()

    def changed(self) -> bool:
        """Whether the numbers have changed at all; it takes less time than a token."""
        return self._weights.changed()

    def check(self, x: Tensor, state: Any) -> None:
        """Raise InputError unless a step can take this input and state."""
        check_call(self.ready, "step_", x, state)

    @torch.no_grad()
    def step_(self, x: Tensor, state: Any) -> Tensor:
        """Process the next token without gradients, and change the state in place.

        Raises:
            InputError: If the input or the state does not fit the layer.
        """
        if self.is_stale():
            self.refresh()
        y: Tensor = call(self.ready, "step_", x, state)
        return y


def ready(module: LayerT) -> LayerT:
    """The same module, with the results of its prepared methods and those of the modules inside."""
    return _ready(module, {})


def _ready(module: Any, made: dict[int, Any]) -> Any:
    """A shallow copy of a module and of the modules inside, which shares their parameters.

    A module with methods of its own stays as it is, such as one of FSDP, which gathers the weights
    of this very module, and frees them after the call.
    """
    kind: Any = type(module)
    if any(callable(vars(module)[name]) for name in vars(module).keys() & _names(kind)):
        return module
    if (key := id(module)) not in made:
        hooked = any(map(vars(module).get, _HOOKS))
        made[key] = copy = object.__new__(_decoding(kind, hooked))
        children = {name: child and _ready(child, made) for name, child in module._modules.items()}
        own = {**module._parameters, **module._buffers, **children}  # found without __getattr__
        vars(copy).update({**vars(module), **own, "_modules": children})
        vars(copy).update({name: get(copy) for name, get in _constants(kind).items()})
    return made[key]


_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
"""Where a module keeps its hooks."""


@cache
def _names(kind: Any) -> frozenset[str]:
    """What a class has."""
    return frozenset(dir(kind))


@cache
def _decoding(kind: Any, hooked: bool) -> Any:
    """The class of a module that decodes."""
    own: dict[str, Any] = {"decodes": True, **dict.fromkeys(_constants(kind))}
    marked = (name for name in dir(kind) if hasattr(getattr(kind, name), "prepared"))
    own |= {name: _once(getattr(kind, name)) for name in marked}
    made: Any = type(kind)(kind.__name__, (kind,), own)
    for name in VERBS if hasattr(kind, "packs") else ():  # a sequence layer
        verb = getattr(kind, name).own
        setattr(made, name, verb if name.startswith("step") else _of_no_documents(verb))
    if not hooked:
        made.__call__ = _DIRECTLY.get(kind, made.forward)
    return made


_DIRECTLY: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.LayerNorm: lambda of, x: torch.layer_norm(x, of.normalized_shape, of.weight, of.bias, of.eps)
}
"""What PyTorch's own modules call in the end."""


def _of_no_documents(verb: Callable[..., T]) -> Callable[..., T]:
    """A method of layers of which not all take ``starts``; a decoder reads single documents."""
    if takes_starts(verb):
        return verb

    def run(self: Any, *inputs: Any, starts: None = None, **options: Any) -> T:  # noqa: ARG001
        return verb(self, *inputs, **options)

    return run


@cache
def _constants(kind: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Marked properties of a class."""
    found = {name: getattr(getattr(kind, name), "fget", None) for name in dir(kind)}
    return {name: get for name, get in found.items() if get and hasattr(get, "prepared")}


def _once(method: Callable[[Any], T]) -> Callable[[Any], T]:
    def run(self: Any) -> T:
        value = method(self)
        vars(self)[method.__name__] = repeat(value).__next__  # takes no call of Python
        return value

    return run


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, also of one that decodes."""
    kind = type(module)
    return kind.__bases__[0] if getattr(kind, "decodes", False) else kind
