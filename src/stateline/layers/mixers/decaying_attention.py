"""What the layers of linear attention with a decay have in common."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, records, zeros
from stateline.layers.documents import Documents, mask_of
from stateline.layers.mixers.linear_attention import LinearAttentionState
from stateline.ops import (
    LinearSignals,
    linear_attention,
    linear_attention_step,
    linear_attention_step_,
)
from stateline.ops.linear_attention import CHUNK
from stateline.settings import at_least


class DecayingAttention(SequenceLayer[Any]):
    """Linear attention whose state decays; its state is one matrix per head.

    Abstract: subclasses say which queries, keys, values and decays follow from the input, and how
    the output of the heads becomes the output of the layer. The state stays float32 under a cast to
    half precision.

    Args:
        d_model: Width of input and output.
        n_heads: Number of heads.
        d_key: Width of queries and keys of a head.
        d_value: Width of the values of a head.

    Attributes:
        chunk: Tokens inside which the layer attends.
    """

    packs = True
    chunk: ClassVar[int] = CHUNK
    out_proj: nn.Linear

    def __init__(self, d_model: int, n_heads: int, d_key: int, d_value: int) -> None:
        super().__init__(d_model)
        self.n_heads, self.d_key, self.d_value = n_heads, d_key, d_value

    @abstractmethod
    def signals(
        self,
        x: Float[Tensor, "batch *length d_model"],
        state: Any,
        starts: Documents | None = None,
    ) -> tuple[Any, ...]:
        """Queries, keys, values (..., head, entry), logarithmic decays, and input of the gate."""

    @abstractmethod
    def read(self, y: Float[Tensor, "batch *length head d_value"], gate: Any) -> Tensor:
        """Output, from the output of the heads and the input of the gate."""

    def after(self, state: Any, s: Tensor, gate: Any) -> Any:  # noqa: ARG002
        """The state after the tokens; its matrices are ``s``."""
        return state._replace(s=s)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:  # noqa: ARG002
        """Zero state."""
        s = zeros(self.out_proj.weight, batch_size, self.n_heads, self.d_key, self.d_value)
        return LinearAttentionState(s.to(torch.promote_types(s.dtype, torch.float32)))

    def _forward_chunk(
        self, x: Tensor, state: Any, starts: Documents | None = None
    ) -> tuple[Tensor, Any]:
        *signals, gate = self.signals(x, state, starts)
        y, s = linear_attention(LinearSignals(*signals), state.s, starts=mask_of(starts))
        return self.read(y, gate), self.after(state, s, gate)

    def _step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        *signals, gate = self.signals(x, state)
        y, s = linear_attention_step(LinearSignals(*signals), state.s)
        return self.read(y, gate), self.after(state, s, gate)

    def _step_(self, x: Tensor, state: Any) -> Tensor:
        if records(x):
            return super()._step_(x, state)
        *signals, gate = self.signals(x, state)
        return self.read(linear_attention_step_(LinearSignals(*signals), state.s), gate)

    def flops_per_token(self, length: int) -> float:
        """Linear maps, products with the state, and attention inside a chunk."""
        heads, keys, values = self.init_state(1).s.shape[1:]
        inside = 2.0 * heads * min(length, self.chunk) * (keys + values)
        return super().flops_per_token(length) + inside + 4.0 * heads * keys * values


def expanded(d_model: int, n_heads: int, **factors: float) -> list[int]:
    """Width of a head for each multiple of the model's width.

    Raises:
        InputError: If there is no head, or the heads do not divide a width.
    """
    at_least(1, n_heads=n_heads)
    widths = []
    for name, factor in factors.items():
        width = round(factor * d_model)
        if width < 1 or width % n_heads:
            raise InputError(
                f"n_heads must divide {name} * d_model, got {n_heads=}, {name}={factor} and "
                f"{d_model=}"
            )
        widths.append(width // n_heads)
    return widths
