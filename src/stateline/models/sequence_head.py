"""Classifiers and regressors of sequences: the layers of a language model under another head."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers import NORMS, SequenceLayer
from stateline.layers.base import accumulates
from stateline.layers.dropout import Dropout
from stateline.layers.linear import Linear
from stateline.layers.state import shown
from stateline.models.build import build_stack
from stateline.models.config import MAX_SIZE, ModelConfig, Width
from stateline.models.initial_weights import initialise
from stateline.models.inputs import check_length, check_tokens, length_limit
from stateline.ops.kernel_op import values_at_hand
from stateline.settings import at_least, check_kind, within

Pooling = Literal["mean", "last"]


@dataclass(frozen=True)
class HeadConfig(ModelConfig):
    """Settings of classifiers and regressors, besides those of :class:`~stateline.ModelConfig`.

    ``tie_embeddings``, ``head_bias``, ``embedding_multiplier``, ``embedding_norm``,
    ``logits_divisor`` and ``logits_soft_cap`` have no effect.

    Attributes:
        vocab_size: Number of tokens, if the input is tokens.
        n_channels: Numbers per position, if the input is numbers; 0 for tokens.
        pooling: What the output at a position is computed from: the ``mean`` over all positions up
            to it, or the ``last`` position alone. Use ``last`` if every position has a target.
    """

    counts: ClassVar[str]
    """Name of the setting that says how many outputs there are at each position."""

    vocab_size: Width = 1
    n_channels: Annotated[int, within(0, MAX_SIZE)] = 0
    pooling: Pooling = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_channels and self.vocab_size > 1:
            raise InputError(
                "the input is either tokens (vocab_size) or numbers (n_channels), got both: "
                f"vocab_size={self.vocab_size} and n_channels={self.n_channels}"
            )

    @property
    def n_outputs(self) -> int:
        """Logits or predicted numbers per position."""
        return int(getattr(self, self.counts))


@dataclass(frozen=True)
class ClassifierConfig(HeadConfig):
    """Configuration of a classifier: :class:`~stateline.models.sequence_head.HeadConfig` and this.

    Attributes:
        n_classes: Number of classes.
    """

    kind, counts = "classifier", "n_classes"

    n_classes: Annotated[int, within(2, MAX_SIZE)] = 2


@dataclass(frozen=True)
class RegressorConfig(HeadConfig):
    """Configuration of a regressor: :class:`~stateline.models.sequence_head.HeadConfig` and this.

    Attributes:
        n_values: Numbers to predict at each position.
    """

    kind, counts = "regressor", "n_values"

    n_values: Width = 1


@accumulates("total")
class HeadState(NamedTuple):
    """Number of positions read, their sum (empty unless pooled by mean), and the layers' states."""

    position: Int[Tensor, " batch"]
    total: Float[Tensor, "batch width"]
    layers: tuple[Any, ...]


class SequenceHead(SequenceLayer[HeadState]):
    r"""Embedding or linear map, blocks, normalisation, pooling, and a linear map to the outputs.

    .. math:: z_t = W\,\frac{1}{t} \sum_{s \le t} \mathrm{norm}(\mathrm{stack}(x))_s + b

    With causal layers, the output at position t depends on the first t positions only. So padding
    after the end of a row does not change the row's output, and a stream is answered step by step.
    With :class:`~stateline.layers.Bidirectional` layers, rows of different lengths need
    ``lengths``.

    Pooling over the first position, as in BERT, is not offered: a causal layer has read nothing
    there.

    Raises:
        InputError: If the configuration cannot be built.
    """

    def __init__(self, config: HeadConfig) -> None:
        check_kind("config", config, HeadConfig, "ClassifierConfig('s4d', vocab_size=256)")
        super().__init__(config.d_model)
        self.config = config
        width, channels = config.d_model, config.n_channels
        self.embedding = None if channels else nn.Embedding(config.vocab_size, width)
        self.encoder = Linear(channels, width) if channels else None
        self.positions = nn.Embedding(config.max_len, width) if config.max_len else None
        self.dropout = Dropout(config.embedding_dropout)
        self.stack = build_stack(config)
        self.causal = self.stack.causal
        self.max_len = length_limit(config.max_len, self.stack)
        self.norm = NORMS[config.norm](width, config.norm_eps)
        self.head = Linear(width, config.n_outputs)
        initialise(self, width, config.init)
        if self.encoder is not None:
            # Inputs of unit variance are mapped to unit variance.
            nn.init.normal_(self.encoder.weight, std=channels**-0.5)

    def outputs(
        self, x: Tensor, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch outputs"]:
        """Outputs for whole rows: the outputs at the last position of each.

        Args:
            x: Tokens (batch, length) or numbers (batch, length, channels). Pad shorter rows at the
                end, with any finite values.
            lengths: Number of positions of each row; all by default.

        Raises:
            InputError: If the input has another shape or type, is empty, or the lengths are not
                one integer per row, from 1 to the input's length.
        """
        self._check_shape(x, "batch", "length")
        if not x.shape[1]:
            raise InputError("the input must have at least one position, got none")
        if lengths is None:
            return self(x)[:, -1]
        integers = isinstance(lengths, Tensor) and lengths.dtype in (torch.int64, torch.int32)
        if not integers or lengths.shape != x.shape[:1]:
            raise InputError(
                f"lengths must be an integer for each of the {len(x)} rows, a tensor of int64 or "
                f"int32, got {shown(lengths)}"
            )
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > x.shape[1]:
            raise InputError(f"lengths must be from 1 to {x.shape[1]}, got {low} to {high}")
        return self(x, lengths)[torch.arange(len(x), device=x.device), lengths - 1]

    def init_state(self, batch_size: int, *, capacity: int = 0) -> HeadState:
        """State before the first position."""
        at_least(0, batch_size=batch_size, capacity=capacity)
        weight = self.head.weight
        position = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        width = self.d_model if self.config.pooling == "mean" else 0
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(batch_size, width, dtype=dtype, device=weight.device)
        return HeadState(position, total, self.stack.init_state(batch_size, capacity=capacity))

    @override
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        check_length(self.max_len, x.shape[1])
        places = torch.arange(x.shape[1], device=x.device)
        h = self.norm(self.stack(self._enter(x, places), lengths))
        return self.head(self._pool(h, places + 1, None))

    @override
    def forward_chunk(self, x: Tensor, state: HeadState) -> tuple[Tensor, HeadState]:
        check_length(self.max_len, x.shape[1], state.position)
        places = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        h, layers = self.stack.forward_chunk(self._enter(x, places), state.layers)
        h = self.norm(h)
        y = self.head(self._pool(h, places + 1, state.total))
        mean = self.config.pooling == "mean"
        total = state.total + h.sum(dim=1, dtype=state.total.dtype) if mean else state.total
        return y, HeadState(state.position + x.shape[1], total, layers)

    @override
    def step(self, x: Tensor, state: HeadState) -> tuple[Tensor, HeadState]:
        h, layers = self.stack.step(self._enter_one(x, state), state.layers)
        y, total = self._answer(h, state)
        return y, HeadState(state.position + 1, total, layers)

    @override
    def step_(self, x: Tensor, state: HeadState) -> Tensor:
        h = self.stack.step_(self._enter_one(x, state), state.layers)
        y, total = self._answer(h, state)
        state.total.copy_(total)
        state.position.add_(1)
        return y

    def example_input(self, batch_size: int, length: int) -> Tensor:
        """Random tokens or numbers, as the model takes them."""
        shape, weight = (batch_size, length), self.head.weight
        if self.config.n_channels:
            numbers = (*shape, self.config.n_channels)
            return torch.randn(numbers, dtype=weight.dtype, device=weight.device)
        return torch.randint(self.config.vocab_size, shape, device=weight.device)

    def state_bytes(self, length: int) -> int:
        """Bytes of the layers' states, the sum and the position."""
        total = self.init_state(1).total
        return self.stack.state_bytes(length) + total.numel() * total.element_size() + 8

    def check_values(self, x: Tensor, axes: tuple[str, ...] = ("batch", "length")) -> None:
        """Raise InputError unless the input is tokens or finite numbers, as configured."""
        self._check_shape(x, *axes)
        if not values_at_hand(x):
            return
        if not self.config.n_channels:
            check_tokens(x, self.config.vocab_size)
        elif not x.isfinite().all():  # FFTs would spread NaN to all positions
            raise InputError("the input must be finite, got NaN or infinite numbers")

    def _check_shape(self, x: Tensor, *axes: str) -> None:
        channels = self.config.n_channels
        fits = isinstance(x, Tensor) and x.ndim == len(axes) + bool(channels)
        if channels:
            fits = fits and x.shape[-1] == channels and x.is_floating_point()
        if not fits:
            kind = "floating-point numbers" if channels else "tokens"
            shape = ", ".join([*axes, str(channels)] if channels else axes)
            raise InputError(f"the input must be {kind} of shape ({shape}), got {shown(x)}")

    def _enter(self, x: Tensor, places: Tensor) -> Float[Tensor, "batch length d_model"]:
        enter = self.embedding if self.encoder is None else self.encoder
        assert enter is not None
        h = enter(x)
        return self.dropout(h if self.positions is None else h + self.positions(places))

    def _enter_one(self, x: Tensor, state: HeadState) -> Float[Tensor, "batch d_model"]:
        check_length(self.max_len, 1, state.position)
        return self._enter(x[:, None], state.position[:, None])[:, 0]

    def _answer(self, h: Tensor, state: HeadState) -> tuple[Tensor, Tensor]:
        """Outputs after one more position, and the sum up to it."""
        h = self.norm(h)
        if self.config.pooling == "last":
            return self.head(h), state.total
        total = state.total + h
        return self.head((total / (state.position[:, None] + 1)).to(h.dtype)), total

    def _pool(self, h: Tensor, counts: Tensor, before: Tensor | None) -> Tensor:
        """Pooled features at each position; ``before`` is the sum over earlier positions."""
        if self.config.pooling == "last":
            return h
        total = h.cumsum(dim=1, dtype=torch.promote_types(h.dtype, torch.float32))
        total = total if before is None else before[:, None] + total
        return (total / counts[..., None]).to(h.dtype)


class SequenceClassifier(SequenceHead):
    """A sequence model whose outputs are the logits of classes.

    Example:
        >>> config = ClassifierConfig("s4d", d_model=16, n_channels=1, n_classes=10)
        >>> audio = torch.zeros(2, 30, 1)
        >>> SequenceClassifier(config).classify(audio, lengths=torch.tensor([30, 7])).shape
        torch.Size([2, 10])
    """

    config: ClassifierConfig
    classify = SequenceHead.outputs


class SequenceRegressor(SequenceHead):
    """A sequence model whose outputs are continuous values.

    The outputs are used as they are: scale the targets to about unit variance for training.

    Example:
        >>> config = RegressorConfig("s4d", d_model=16, n_channels=3, n_values=2, pooling="last")
        >>> model, signal = SequenceRegressor(config), torch.zeros(2, 30, 3)
        >>> model(signal).shape, model.predict(signal, lengths=torch.tensor([30, 7])).shape
        (torch.Size([2, 30, 2]), torch.Size([2, 2]))
    """

    config: RegressorConfig
    predict = SequenceHead.outputs
