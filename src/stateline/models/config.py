"""The configuration of a model, as plain data."""

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from stateline.errors import InputError
from stateline.files import parse_json_object
from stateline.pattern import Value, canonical_pattern
from stateline.settings import Fraction, Positive, Settings, within

Init = Literal["width", "gpt2", "h3", "neox", "mamba", "staircase", "t5", "lstm"]

ConfigT = TypeVar("ConfigT", bound="ModelConfig")

MAX_SIZE = 1 << 24
"""Upper limit of widths, vocabularies and lengths: typos become clear errors."""

Width = Annotated[int, within(1, MAX_SIZE)]

PRESET_NAME = re.compile(r"\w+-[\w.-]+")
"""Form of the name of a preset: no name in a pattern has a hyphen."""

TRANSFORMERS_SETTINGS = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Settings that transformers adds to the ``config.json`` of an exported model; ignored here."""


Block = Literal["sequential", "parallel", "post_norm", "normed", "sandwich", "plain"]

FeedForwardKind = Literal[
    "gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "geglu_exact", "moe", "none"
]


@dataclass(frozen=True)
class ModelConfig(Settings):
    """Configuration of a language model.

    Attributes:
        pattern: The layers, for example ``"attention(position=rope) (h3*2 attention)*4"``, in the
            canonical spelling. For the name of a preset, such as ``"mamba-130m"``, see
            :func:`stateline.models.presets.configure`.
        vocab_size: Number of tokens.
        d_model: Width of the residual stream.
        block: How a layer and its feed-forward are joined. ``sequential``: each in its own residual
            branch, one after the other. ``parallel``: both branches read the same input, and their
            sum is added to it, as in GPT-NeoX. ``post_norm``: each in a branch whose sum is
            normalised, as in the original Transformer. ``normed``: each in a branch that adds to
            its normalised input, as in MiniMax-01. ``sandwich``: each in a branch with norms before
            and after it, as in Gemma 2. ``plain``: one after the other, without norms
            and residuals.
        norm_after: Mixers, separated by spaces, in whose sequential blocks the norms follow the
            layers: ``x + norm(layer(x))``, as in OLMo 2.
        norm: Normalisation before each layer and at the end: ``layer``, ``rms``, ``rms_offset``
            (whose weight is stored as an offset from one), ``batch`` (batch normalisation, for
            models without causal layers alone) or ``none``.
        norm_eps: Added to the variance (or mean square) before taking its root.
        feed_forward: What follows each layer that wants a feed-forward: ``gelu`` (tanh
            approximation), ``gelu_exact``, ``relu``, ``relu2``, ``swiglu``, ``geglu``,
            ``geglu_exact``, ``moe`` (a mixture of experts) or ``none``. A ``feed_forward`` that
            the pattern names is of this kind, too, unless it has its own ``activation``.
        tie_embeddings: Use the embedding matrix as the output matrix.
        head_bias: Add a bias to an output matrix that is not tied.
        max_len: If set, positions have learned embeddings, and longer inputs are refused. If
            ``None``, there are no position embeddings and no limit.
        trained_len: Longest text that a published model was trained on, if it has no ``max_len``;
            longer ones are read, and commands warn of them.
        layers: Keywords for all layers of a kind, which a pattern may override; the
            keywords of ``feed_forward`` and of ``moe`` also apply inside blocks.
        embedding_multiplier: Factor of the embeddings of tokens.
        embedding_norm: Whether the embedded input is normalised, as in RWKV.
        residual_multiplier: Factor of the output of each residual branch.
        stream_multiplier: Factor of the residual stream before that output is added.
        logits_divisor: Divisor of the logits.
        logits_soft_cap: If set, logits y become c tanh(y / c) for this c.
        embedding_dropout: Probability that an entry of the embedded input is dropped in training.
        residual_dropout: The same for the output of each residual branch. Attention weights, the
            hidden units of feed-forwards and what LSTM layers pass on are dropped by the keyword
            ``dropout`` of these layers.
        init: How weights begin: by the model's ``width``, or as in the official code of ``gpt2``,
            ``h3``, ``neox``, ``mamba``, ``staircase``, ``t5`` or ``lstm``.
    """

    kind: ClassVar[str] = "language_model"
    owner: ClassVar[str] = "the model configuration"

    pattern: str
    vocab_size: Width
    d_model: Width = 64
    block: Block = "sequential"
    norm_after: str = ""
    norm: Literal["layer", "rms", "rms_offset", "batch", "none"] = "layer"
    norm_eps: Positive = 1e-5
    feed_forward: FeedForwardKind = "gelu"
    tie_embeddings: bool = True
    head_bias: bool = False
    max_len: Width | None = None
    trained_len: Width | None = None
    layers: Mapping[str, Mapping[str, Value]] = field(default_factory=dict, hash=False)
    embedding_multiplier: Positive = 1.0
    embedding_norm: bool = False
    residual_multiplier: Positive = 1.0
    stream_multiplier: Positive = 1.0
    logits_divisor: Positive = 1.0
    logits_soft_cap: Positive | None = None
    embedding_dropout: Fraction = 0.0
    residual_dropout: Fraction = 0.0
    init: Init = "width"

    def __post_init__(self) -> None:
        if PRESET_NAME.fullmatch(self.pattern):
            raise InputError(
                f"a pattern names layers, got {self.pattern!r}: if it is a preset, call "
                f"stateline.models.presets.configure({self.pattern!r})"
            )
        object.__setattr__(self, "pattern", canonical_pattern(self.pattern))
        self._check_block()
        if self.head_bias and self.tie_embeddings:
            raise InputError(
                "head_bias=True needs an output matrix of its own: set tie_embeddings=False"
            )

    def _check_block(self) -> None:
        if self.norm_after and self.block != "sequential":
            raise InputError(f"norm_after needs block='sequential', got {self.block!r}")
        if self.stream_multiplier != 1 and self.block in ("parallel", "plain"):
            raise InputError(f"stream_multiplier cannot be used with block={self.block!r}")

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What follows from the configuration, and is kept beside it in memory alone."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "kept"}

    @property
    def n_outputs(self) -> int:
        """Logits per position."""
        return self.vocab_size

    def to_json(self) -> str:
        """The configuration as a JSON text."""
        values = dataclasses.asdict(self)
        if self.trained_len is None:  # most models have none
            del values["trained_len"]
        return json.dumps({"kind": self.kind, **values}, indent=2) + "\n"

    @classmethod
    def from_json(cls: type[ConfigT], text: str) -> ConfigT:
        """Read a configuration written by :meth:`to_json`.

        Raises:
            InputError: If the text is not JSON, is of another kind of model, names an unknown
                setting, or lacks one.

        Example:
            >>> config = ModelConfig("h3*2", vocab_size=256)
            >>> ModelConfig.from_json(config.to_json()) == config
            True
        """
        values = parse_json_object(text, "model configuration")
        if (kind := values.pop("kind", cls.kind)) != cls.kind:
            raise InputError(f"the model configuration must be of a {cls.kind}, got {kind!r:.40}")
        return cls.from_values(values)

    @classmethod
    def from_values(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """Make a configuration from settings by name.

        Raises:
            InputError: If a name is unknown, a setting without default is missing, or a value
                cannot be used.
        """
        if values.get("model_type") == "stateline":
            values = {k: v for k, v in values.items() if k not in TRANSFORMERS_SETTINGS}
        parameters = inspect.signature(cls).parameters
        required = {p.name for p in parameters.values() if p.default is p.empty}
        if missing := required - set(values):
            raise InputError(f"the model configuration lacks {', '.join(sorted(missing))}")
        return cls(**values)


def feed_forward_of(config: ModelConfig) -> tuple[str, dict[str, Value]]:
    """The layer that is the feed-forward of the blocks, and its keywords.

    Example:
        >>> feed_forward_of(ModelConfig("attention", vocab_size=2, feed_forward="swiglu"))
        ('feed_forward', {'activation': 'swiglu'})
    """
    if config.feed_forward == "moe":
        return "moe", {}
    return "feed_forward", {"activation": config.feed_forward}
