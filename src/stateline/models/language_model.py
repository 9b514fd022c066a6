"""A language model: a sequence layer from tokens to logits."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers import NORMS, SequenceLayer
from stateline.layers.base import require_causal
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents, count_positions
from stateline.layers.dropout import Dropout
from stateline.layers.int8 import Int8Embedding, Int8Linear, to_int8_
from stateline.layers.linear import Linear
from stateline.layers.state import shown
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.initial_weights import initialise
from stateline.models.inputs import check_axes, check_length, check_tokens, length_limit
from stateline.ops import linear_stepper
from stateline.ops.int8_linear import GROUP
from stateline.ops.kernel_op import values_at_hand
from stateline.ops.linear import linear
from stateline.settings import at_least

Reduce = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Computes what a model returns from its map to logits and the output of its last layer."""


def chunks(h: Tensor, targets: Tensor, positions: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs of the last layer and targets, some positions of all rows at a time, in order.

    Args:
        h: Outputs (batch, length, d_model).
        targets: The targets (batch, length).
        positions: Most positions of a chunk over all rows; it has one of each row at least.
    """
    width = max(1, positions // len(h))
    return zip(h.split(width, dim=1), targets.split(width, dim=1), strict=True)


class LanguageModelState(NamedTuple):
    """Number of tokens read, and the states of the layers."""

    position: Int[Tensor, " batch"]
    layers: tuple[Any, ...]


class LanguageModel(SequenceLayer[LanguageModelState]):
    r"""Embedding, blocks, normalisation, and a linear map to the logits of the next token.

    ``forward`` and ``forward_chunk`` give the logits at every position; with ``keep=n`` only at the
    last n (0: none). Prefill needs no others; each costs one product with the output matrix.
    Floats in the place of tokens are embeddings (batch, length, d_model), as the table of
    embeddings gives them: prompts that are learned, or that other encoders wrote.
    With ``reduce``, a function of the map to logits and the output of the last layer, they give
    what it returns, such as a loss that never has all logits in memory.

    By default, linear maps and embeddings are initialised from a normal distribution with standard
    deviation :math:`\sqrt{2 / (5\, d_\mathrm{model})}` (0.02 at a width of 1,000, as in GPT-2),
    biases with zero; the last maps of residual branches are divided by the root of the number of
    branches. State space and LSTM parameters keep the initial values of their layers. For other
    schemes see ``stateline.models.initial_weights.initialise``.

    Raises:
        InputError: If the configuration cannot be built; in all methods, if the tokens, the state
            or ``keep`` cannot be used.

    Example:
        >>> model = LanguageModel(ModelConfig("h3 attention", vocab_size=10, d_model=16))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 10])

    References:
        Radford et al., 2019 (GPT-2), for embedding, norm and head; Nguyen and Salazar,
        "Transformers without Tears", 2019, for the standard deviation.
    """

    def __init__(self, config: ModelConfig) -> None:
        if not isinstance(config, ModelConfig):
            raise InputError(
                f"LanguageModel takes a ModelConfig, got {shown(config)}: give such as "
                'ModelConfig("h3", vocab_size=256)'
            )
        super().__init__(config.d_model)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model) if config.max_len else None
        norm = NORMS[config.norm if config.embedding_norm else "none"]
        self.embedding_norm = norm(config.d_model, config.norm_eps)
        self.dropout = Dropout(config.embedding_dropout)
        self.stack = build_stack(config)
        self.causal = self.stack.causal  # a model that is not causal can only be measured
        self.max_len = length_limit(config.max_len, self.stack)
        normed = config.block == "post_norm"  # already normalised by the last branch
        self.norm = NORMS["none" if normed else config.norm](config.d_model, config.norm_eps)
        tied, bias = config.tie_embeddings, config.head_bias
        self.head = None if tied else Linear(config.d_model, config.vocab_size, bias=bias)
        initialise(self, config.d_model, config.init)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self._weight.dtype

    @property
    def _weight(self) -> Tensor:
        """The table of embeddings; if that is integers, the first weight that is not."""
        return next(x for x in chain(self.parameters(), self.buffers()) if x.is_floating_point())

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LanguageModelState:
        """State before the first token."""
        at_least(0, batch_size=batch_size, capacity=capacity)
        position = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        return LanguageModelState(position, self.stack.init_state(batch_size, capacity=capacity))

    @override
    def forward(
        self,
        x: Tensor,
        *,
        keep: int | None = None,
        starts: Documents | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        require_causal(self, "the prediction of what follows")
        check_length(self.max_len, x.shape[1] if starts is None else starts.longest)
        positions = torch.arange(x.shape[1], device=x.device)
        positions = positions if starts is None else starts.positions
        h = self.stack(self._embed(x, positions), starts=starts)
        return self._outputs(_last(h, keep), reduce)

    def hidden_states(
        self, x: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch length d_model"], ...]:
        """Input of the first layer and output of each layer, at every position."""
        return tuple(self.streams(x))

    def streams(
        self, x: Int[Tensor, "batch length"]
    ) -> Iterator[Float[Tensor, "batch length d_model"]]:
        """The same one after the other: each layer runs when its output is asked for."""
        self.check_values(x)
        check_length(self.max_len, x.shape[1])
        stream = self._embed(x, torch.arange(x.shape[1], device=x.device))
        yield stream
        for link in self.stack.links:
            stream = link(stream)
            yield stream

    @override
    def forward_chunk(
        self,
        x: Tensor,
        state: LanguageModelState,
        *,
        keep: int | None = None,
        starts: Documents | None = None,
        reduce: Reduce | None = None,
    ) -> tuple[Tensor, LanguageModelState]:
        positions, position = count_positions(state.position, x, starts)
        if starts is None:
            check_length(self.max_len, x.shape[1], state.position)
        else:
            check_length(self.max_len, 1, positions.flatten())
        h = self._embed(x, positions)
        h, layers = self.stack.forward_chunk(h, state.layers, starts=starts)
        return self._outputs(_last(h, keep), reduce), LanguageModelState(position, layers)

    @override
    def step(self, x: Tensor, state: LanguageModelState) -> tuple[Tensor, LanguageModelState]:
        check_length(self.max_len, 1, state.position)
        h, layers = self.stack.step(self._embed(x, state.position), state.layers)
        return self._logits(h), LanguageModelState(state.position + 1, layers)

    @override
    def step_(self, x: Tensor, state: LanguageModelState) -> Tensor:
        check_length(self.max_len, 1, state.position)
        h = self.stack.step_(self._embed(x, state.position), state.layers)
        state.position.add_(1)
        return self._logits(h)

    def to_int8_(self) -> None:
        """Round the large matrices to integers of 8 bits, in place.

        Decoding then reads about a quarter of the bytes. The model can be used, but not be trained
        or saved. See :func:`stateline.layers.int8.to_int8_` for what is rounded.
        """
        to_int8_(self)
        if min(self.embedding.weight.shape) >= GROUP:
            table = Int8Linear(self.embedding.weight.detach(), None)
            self.embedding = Int8Embedding(table)
            self.head = self.head or table

    def example_input(self, batch_size: int, length: int) -> Int[Tensor, "batch length"]:
        """Random tokens."""
        shape = (batch_size, length)
        return torch.randint(self.config.vocab_size, shape, device=self.device)

    def state_bytes(self, length: int) -> int:
        """Bytes of the layers' states and of the position."""
        return self.stack.state_bytes(length) + 8

    def flops_per_token(self, length: int) -> float:
        """Operations of the layers and of the output matrix."""
        return self.stack.flops_per_token(length) + 2.0 * self.embedding.weight.numel()

    def check_values(self, x: Tensor, axes: tuple[str, ...] = ("batch", "length")) -> None:
        """Check the tokens of a call from outside, where that does not wait for a device."""
        if isinstance(x, Tensor) and x.is_floating_point():
            check_axes(x, *axes, "d_model", width=self.d_model)
            return
        check_axes(x, *axes)
        if values_at_hand(x):
            self.check_tokens(x)

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise InputError unless the tokens are integers below ``vocab_size``."""
        check_tokens(tokens, self.config.vocab_size)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        h = tokens if tokens.is_floating_point() else self.embedding(tokens)
        if (multiplier := self.config.embedding_multiplier) != 1:
            h = h * multiplier
        h = h if self.positions is None else h + self.positions(positions)
        h = self.embedding_norm(h) if self.config.embedding_norm else h
        return self.dropout(h) if self.dropout.rate else h

    def _outputs(self, h: Tensor, reduce: Reduce | None) -> Tensor:
        return self._logits(h) if reduce is None else reduce(self._logits, h)

    @prepared
    def tied_head(self) -> Callable[[Tensor], Tensor]:
        """The map of single tokens to logits by the embeddings."""
        return linear_stepper(self.embedding.weight)

    def _logits(self, h: Tensor) -> Tensor:
        h = self.norm(h)
        if self.head is not None:
            y = self.head(h)
        else:
            y = self.tied_head()(h) if self.decodes else linear(h, self.embedding.weight)
        if (divisor := self.config.logits_divisor) != 1:
            y = y / divisor
        return y if (cap := self.config.logits_soft_cap) is None else cap * torch.tanh(y / cap)


def _last(h: Tensor, keep: int | None) -> Tensor:
    """The last ``keep`` positions; all of them by default."""
    at_least(0, keep=keep)
    return h if keep is None else h[:, max(0, h.shape[1] - keep) :]
