"""What recurrences behind a short convolution have in common."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from stateline.layers.base import SequenceLayer, records
from stateline.layers.documents import Documents, mask_of
from stateline.layers.mixers.heads import HeadMaps, MixesValues, TakesHeads, weights_of
from stateline.layers.mixers.short_conv import ShortConv


class ConvolvedRecurrence(SequenceLayer[Any]):
    """A recurrence after a short convolution of some of its inputs; the state holds both states.

    Abstract: subclasses name the op, and say what it takes and how its output is read. The
    parameters of the recurrence and the state stay float32 under a cast to half precision.

    Attributes:
        ops: The op for sequences, for one token, and for one token in place.
        conv: The convolution.
    """

    keeps_float32 = True
    ops: ClassVar[tuple[Callable[..., Any], ...]]
    conv: ShortConv

    @abstractmethod
    def project(self, x: Float[Tensor, "batch *length d_model"]) -> Sequence[Any]:
        """The input of the convolution, and the other inputs of :meth:`signals`."""

    @abstractmethod
    def signals(self, mixed: Tensor, *others: Any) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """What the op takes before the state, and what :meth:`read` needs."""

    @abstractmethod
    def read(self, y: Tensor, *needed: Any) -> Tensor:
        """The output of the layer, from the output of the op."""

    def scan(self, *inputs: Any, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The op for sequences: its output, and the state after them."""
        return self.ops[0](*inputs, starts=starts)

    @override
    def forward_chunk(
        self, x: Tensor, state: Any, starts: Documents | None = None
    ) -> tuple[Tensor, Any]:
        convolve = partial(self.conv.forward_chunk, starts=starts)
        return self._advance(x, state, convolve, partial(self.scan, starts=mask_of(starts)))

    @override
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._advance(x, state, self.conv.step, self.ops[1])

    def _advance(
        self, x: Tensor, state: Any, convolve: Callable[..., Any], scan: Callable[..., Any]
    ) -> tuple[Tensor, Any]:
        mixed, *others = self.project(x)
        mixed, conv = convolve(mixed, state.conv)
        inputs, needed = self.signals(mixed, *others)
        y, s = scan(*inputs, state[1])
        return self.read(y, *needed), type(state)(conv, s)

    @override
    def step_(self, x: Tensor, state: Any) -> Tensor:
        if not self.decodes and records(x):
            return super().step_(x, state)
        mixed, *others = self.project(x)
        inputs, needed = self.signals(self.conv.step_(mixed, state.conv), *others)
        return self.read(self.ops[2](*inputs, state[1]), *needed)


class ConvolvedValues(ConvolvedRecurrence, MixesValues):
    """A recurrence of which each head sums values; abstract, as :class:`ConvolvedRecurrence`."""

    def mixing(self, x: Tensor) -> Tensor:
        """What the recurrence makes of the convolved values."""
        state = self.init_state(len(x))
        mixed, *others = self.project(x)
        mixed, _ = self.conv.forward_chunk(mixed, state.conv)
        (signals,), _ = self.signals(mixed, *others)
        return weights_of(lambda v: self.scan(signals._replace(v=v), state[1])[0], signals.v)


class ConvolvedHeads(ConvolvedValues, TakesHeads):
    """A recurrence whose first map gives queries, keys and values, in this order, of heads.

    Abstract, as :class:`ConvolvedRecurrence`.

    Attributes:
        in_proj: The first map.
    """

    in_proj: nn.Linear

    @property
    @abstractmethod
    def head_shape(self) -> Sequence[tuple[int, int]]:
        """Number and width of heads, for queries, keys and values."""

    @torch.no_grad()
    def take(self, maps: HeadMaps) -> bool:
        """The first rows of ``in_proj``; the convolution hands them on."""
        if [tuple(each.shape[:2]) for each in maps] != [*self.head_shape]:
            return False
        rows = torch.cat([each.flatten(0, 1) for each in maps])
        self.in_proj.weight[: len(rows)] = rows
        self.conv.kernel[: len(rows)] = 0
        self.conv.kernel[: len(rows), 0] = 1
        return True
