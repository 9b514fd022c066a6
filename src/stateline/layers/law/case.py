"""A layer with an input and the ways to run it, and how two results are compared."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.base import AnyLayer
from stateline.layers.state import State, named_leaves

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative error max|a - b| / max|b| of a tensor, by dtype of the check."""


@dataclass
class Case:
    """A layer, an input, and the lengths of the chunks into which it is cut.

    Attributes:
        length: Tokens of a longer input, if the layer can read so many.
    """

    layer: AnyLayer
    x: Tensor
    chunks: tuple[int, ...]
    dtype: torch.dtype
    length: int = 0

    @property
    def limit(self) -> float:
        """Largest relative error that passes."""
        return LIMITS[self.dtype]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: one with another behind it, if the layer has room."""
        size, most = self.x.shape[1], self.layer.max_len
        return max(size, self.length if most is None else min(self.length, most - size))

    def run(self, x: Tensor, chunks: Sequence[int], state: State) -> tuple[Tensor, State]:
        """Feed the chunks in order."""
        outputs = []
        for chunk in x.split(list(chunks), dim=1):
            y, state = self.layer.forward_chunk(chunk, state)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    def by_steps(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Feed one token after the other by ``step``."""
        outputs = []
        for x_t in x.unbind(dim=1):
            y, state = self.layer.step(x_t, state)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state

    def by_steps_in_place(self, x: Tensor, state: State) -> Tensor:
        """Feed one token after the other by ``step_``, which changes the state."""
        with torch.no_grad():
            return torch.stack([self.layer.step_(x_t, state) for x_t in x.unbind(dim=1)], dim=1)

    def verbs(self) -> dict[str, Callable[[Tensor, Any], tuple[Tensor, Any]]]:
        """The methods that continue from a state; ``step`` reads the first token of a sequence."""

        def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            y, state = self.layer.step(x[:, 0], state)
            return y[:, None], state

        return {"forward_chunk": self.layer.forward_chunk, "step": step}

    def init(self, batch_size: int | None = None, capacity: int = 0) -> State:
        """Initial state, by default with the rows of the input."""
        return self.layer.init_state(batch_size or self.x.shape[0], capacity=capacity)

    def example(self, batch_size: int, length: int) -> Tensor:
        """Another random input."""
        return example_input(self.layer, batch_size, length, self.dtype)

    def warm(self, capacity: int = 0) -> State:
        """State after the first chunk of another sequence, so that nothing is zero."""
        other = self.example(self.x.shape[0], self.chunks[0])
        with torch.no_grad():
            return self.layer.forward_chunk(other, self.init(capacity=capacity))[1]


def example_input(layer: AnyLayer, batch_size: int, length: int, dtype: torch.dtype) -> Tensor:
    """Random input of a layer; numbers are of the given dtype, tokens stay tokens."""
    x = layer.example_input(batch_size, length)
    return x.to(dtype) if x.is_floating_point() else x


def change_by_rounding(
    case: Case,
    state: State | None,
    run: Callable[[Case, State | None], Tensor],
    measure: Callable[[Tensor, Tensor], float],
    dtype: torch.dtype,
) -> float:
    """The largest change that one rounding of inputs and weights makes to a result in float64.

    Args:
        case: The layer and its input.
        state: The state.
        run: Gives the result of a case in float64 and its state.
        measure: Compares the result with the exact one.
        dtype: Precision whose roundings are drawn, three times.
    """

    def result(size: float) -> Tensor:
        def moved(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return t.double() * (1 + size * (2 * torch.rand_like(t, dtype=torch.float64) - 1))

        layer = copy.deepcopy(case.layer).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(moved(parameter))
            own = None if state is None else pytree.tree_map(moved, state)
            x = moved(case.x)
        return run(Case(layer, x, case.chunks, torch.float64), own)

    exact = result(0.0)
    return max(measure(result(torch.finfo(dtype).eps), exact) for _ in range(3))


def chooses(layer: AnyLayer) -> bool:
    """Whether a layer, or one inside, chooses discretely."""
    return any(getattr(module, "chooses", False) for module in layer.modules())


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest entry."""
    a, b = a.detach(), b.detach()
    scale = float(b.abs().max()) or 1.0
    return finite((a.to(b.dtype) - b).abs().max() / scale)


def by_position(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference at each position."""
    return (a - b).abs().flatten(2).amax(dim=(0, 2))


def fields(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name."""
    return {name.removeprefix(".") or "the state": leaf for name, leaf in named_leaves(state)}


def differing(first: Any, second: Any, limit: float = 0.0) -> str:
    """Names of the fields in which two states, or results, differ by more than the limit."""
    pairs = zip(fields(first).items(), fields(second).values(), strict=True)
    return ", ".join(
        name
        for (name, a), b in pairs
        if a.shape != b.shape
        or not (torch.equal(a.to(b.dtype), b) or relative(1.0 * a, 1.0 * b) <= limit)
    )


def finite(error: Tensor) -> float:
    """The error as a number; NaN counts as infinitely wrong."""
    return float("inf") if error.isnan() else float(error)
