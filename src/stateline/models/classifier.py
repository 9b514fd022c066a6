"""A classifier of sequences: the layers of a language model, and at each position an answer."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import NORMS, SequenceLayer
from stateline.layers.base import values_at_hand
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.frame import bound, check_length, check_tokens, initialise

Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class ClassifierConfig(ModelConfig):
    """A classifier: a :class:`~stateline.ModelConfig` with another entrance and another end.

    ``tie_embeddings`` and what else bears on the logits of tokens has no meaning here.

    Attributes:
        vocab_size: Number of tokens, where the input is tokens.
        n_channels: Numbers at each position, where the input is numbers; 0 for tokens.
        n_classes: Number of classes.
        pooling: What the answer at a position is drawn from: the ``mean`` of all positions so far,
            or the ``last`` one alone.
    """

    vocab_size: int = 1
    n_channels: int = 0
    n_classes: int = 2
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_classes < 2 or self.n_channels < 0:
            raise InputError(
                "n_classes must be at least 2 and n_channels at least 0, got "
                f"n_classes={self.n_classes} and n_channels={self.n_channels}"
            )
        if self.n_channels and self.vocab_size > 1:
            raise InputError(
                "the input is either tokens (vocab_size) or numbers (n_channels), got both: "
                f"vocab_size={self.vocab_size} and n_channels={self.n_channels}"
            )

    @property
    def n_outputs(self) -> int:
        """Logits at a position."""
        return self.n_classes


class ClassifierState(NamedTuple):
    """Positions seen, the sum over them where their mean is wanted, the states of the layers."""

    position: Int[Tensor, " batch"]
    total: Float[Tensor, "batch width"]
    layers: tuple[Any, ...]

    @staticmethod
    def accumulators() -> tuple[str, ...]:
        """The sum, since its rounding accumulates."""
        return ("total",)


class SequenceClassifier(SequenceLayer[ClassifierState]):
    r"""Embedding or linear map, blocks, normalisation, pooling, and a linear map to classes.

    .. math:: z_t = W\,\frac{1}{t} \sum_{s \le t} \mathrm{norm}(\mathrm{stack}(x))_s + b

    The answer at position t is the one for the first t positions. So the answer for a row is that
    at its last position, :meth:`classify`; what fills up a shorter row after its end has no part in
    it; and a stream is classified while it comes, step by step, at the cost of a step.

    Pooling over the first position alone, as BERT does it, is no choice: a causal layer has read
    nothing there.

    Args:
        config: What the model is made of.

    Raises:
        InputError: If the configuration cannot be built.

    Example:
        >>> config = ClassifierConfig("s4d", d_model=16, n_channels=1, n_classes=10)
        >>> model = SequenceClassifier(config)
        >>> audio = torch.zeros(2, 30, 1)
        >>> model.classify(audio, lengths=torch.tensor([30, 7])).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config.d_model)
        self.config = config
        width, channels = config.d_model, config.n_channels
        self.embedding = None if channels else nn.Embedding(config.vocab_size, width)
        self.encoder = nn.Linear(channels, width) if channels else None
        self.positions = nn.Embedding(config.max_len, width) if config.max_len else None
        self.stack = build_stack(config)
        self.max_len = bound(config.max_len, self.stack)
        self.norm = NORMS[config.norm](width, config.norm_eps)
        self.head = nn.Linear(width, config.n_classes)
        initialise(self, width)
        if self.encoder is not None:
            # What has size 1 enters with size 1, whatever the width and the number of channels.
            nn.init.normal_(self.encoder.weight, std=channels**-0.5)

    def classify(
        self, x: Tensor, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """Logits of whole rows.

        Args:
            x: Tokens (batch, length) or numbers (batch, length, channels); shorter rows are filled
                up at the end, with any finite numbers.
            lengths: Positions of each row; by default all.

        Raises:
            InputError: If the input is not of that kind, is empty, or a length is beyond it.
        """
        if not x.shape[1]:
            raise InputError("there must be at least one position to classify, got none")
        if lengths is None:
            return self(x)[:, -1]
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > x.shape[1]:
            raise InputError(f"lengths must be from 1 to {x.shape[1]}, got {low} to {high}")
        return self(x)[torch.arange(len(x), device=x.device), lengths - 1]

    def init_state(self, batch_size: int, *, capacity: int = 0) -> ClassifierState:
        """Nothing seen yet."""
        weight = self.head.weight
        position = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        width = self.d_model if self.config.pooling == "mean" else 0
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(batch_size, width, dtype=dtype, device=weight.device)
        return ClassifierState(
            position, total, self.stack.init_state(batch_size, capacity=capacity)
        )

    def forward(self, x: Tensor) -> Float[Tensor, "batch length classes"]:
        """Logits of the classes after each position."""
        check_length(self.max_len, x.shape[1])
        places = torch.arange(x.shape[1], device=x.device)
        h = self.norm(self.stack(self._enter(x, places)))
        return self.head(self._pool(h, places + 1, None))

    def forward_chunk(
        self, x: Tensor, state: ClassifierState
    ) -> tuple[Float[Tensor, "batch length classes"], ClassifierState]:
        """Logits of the classes after each position of the next piece."""
        check_length(self.max_len, x.shape[1], state.position)
        places = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        h, layers = self.stack.forward_chunk(self._enter(x, places), state.layers)
        h = self.norm(h)
        logits = self.head(self._pool(h, places + 1, state.total))
        mean = self.config.pooling == "mean"
        total = state.total + h.sum(dim=1, dtype=state.total.dtype) if mean else state.total
        return logits, ClassifierState(state.position + x.shape[1], total, layers)

    def step(
        self, x: Tensor, state: ClassifierState
    ) -> tuple[Float[Tensor, "batch classes"], ClassifierState]:
        """Logits of the classes after the next position."""
        h, layers = self.stack.step(self._enter_one(x, state), state.layers)
        logits, total = self._answer(h, state)
        return logits, ClassifierState(state.position + 1, total, layers)

    def step_(self, x: Tensor, state: ClassifierState) -> Float[Tensor, "batch classes"]:
        """Logits of the classes after the next position; the state is changed in place."""
        h = self.stack.step_(self._enter_one(x, state), state.layers)
        logits, total = self._answer(h, state)
        state.total.copy_(total)
        state.position.add_(1)
        return logits

    def example_input(self, batch_size: int, length: int) -> Tensor:
        """Random tokens or numbers."""
        shape, weight = (batch_size, length), self.head.weight
        if self.config.n_channels:
            numbers = (*shape, self.config.n_channels)
            return torch.randn(numbers, dtype=weight.dtype, device=weight.device)
        return torch.randint(self.config.vocab_size, shape, device=weight.device)

    def state_bytes(self, length: int) -> int:
        """Bytes of the layers' states, of the sum and of the position."""
        total = self.init_state(1).total
        return self.stack.state_bytes(length) + total.numel() * total.element_size() + 8

    def flops_per_token(self, length: int) -> float:
        """Operations of the layers, the entrance and the output matrix."""
        entrance = 0 if self.encoder is None else self.encoder.weight.numel()
        return self.stack.flops_per_token(length) + 2.0 * (entrance + self.head.weight.numel())

    def check_input(self, x: Tensor) -> None:
        """Raise InputError unless it is tokens, or finite numbers, as the configuration says."""
        channels = self.config.n_channels
        if not channels and x.ndim == 2:
            check_tokens(x, self.config.vocab_size)
        elif not channels or x.shape[2:] != (channels,) or not x.is_floating_point():
            wanted = f"fractions of shape (batch, length, {channels})"
            wanted = wanted if channels else "tokens of shape (batch, length)"
            raise InputError(f"the input must be {wanted}, got {x.dtype} of {tuple(x.shape)}")
        elif not x.isfinite().all():  # an FFT would spread it to all positions
            raise InputError("the input must be finite numbers, got some that are NaN or infinite")

    def _enter(self, x: Tensor, places: Tensor) -> Float[Tensor, "batch length d_model"]:
        if values_at_hand(x):
            self.check_input(x)
        h = self.embedding(x) if self.embedding is not None else self._encode(x)
        return h if self.positions is None else h + self.positions(places)

    def _encode(self, x: Tensor) -> Tensor:
        assert self.encoder is not None
        return self.encoder(x)

    def _enter_one(self, x: Tensor, state: ClassifierState) -> Float[Tensor, "batch d_model"]:
        check_length(self.max_len, 1, state.position)
        return self._enter(x[:, None], state.position[:, None])[:, 0]

    def _answer(self, h: Tensor, state: ClassifierState) -> tuple[Tensor, Tensor]:
        """Logits after one more position, and the sum up to it."""
        h = self.norm(h)
        if self.config.pooling == "last":
            return self.head(h), state.total
        total = state.total + h
        return self.head((total / (state.position[:, None] + 1)).to(h.dtype)), total

    def _pool(self, h: Tensor, counts: Tensor, before: Tensor | None) -> Tensor:
        """What each position's answer is drawn from; ``before`` is the sum of earlier positions."""
        if self.config.pooling == "last":
            return h
        total = h.cumsum(dim=1, dtype=torch.promote_types(h.dtype, torch.float32))
        total = total if before is None else before[:, None] + total
        return (total / counts[..., None]).to(h.dtype)
