"""What a language model is made of, as plain data."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from stateline.errors import InputError, unknown_name
from stateline.models.pattern import Value, check_settings

ConfigT = TypeVar("ConfigT", bound="ModelConfig")

_MOST = 1 << 24
"""No more of anything: a slip of the keyboard shall not become a request for memory."""


@dataclass(frozen=True)
class ModelConfig:
    """A language model.

    Attributes:
        pattern: The layers, for example ``"attention(position=rope) h3*2"``.
        vocab_size: Number of tokens.
        d_model: Width of the residual stream.
        block: How a layer and its feed-forward are joined. ``sequential``: each in a residual
            branch of its own, one after the other. ``parallel``: both branches see the same input,
            and their sum is added to it, as in GPT-NeoX. ``post_norm``: each in a branch that is
            normalised after its sum, as in the first Transformer. ``plain``: one after the other,
            without norms or residuals.
        norm: Normalisation before each layer and at the end: ``layer``, ``rms`` or ``none``.
        norm_eps: What is added to the variance (or mean square) before its root is taken.
        feed_forward: What follows each layer that wants one: ``gelu`` (tanh approximation),
            ``gelu_exact``, ``relu``, ``swiglu`` or ``none``.
        tie_embeddings: Whether the output matrix is the embedding.
        head_bias: Whether an output matrix that is not the embedding has a bias.
        max_len: With a number, positions have learned embeddings, and no input may be longer;
            without, there are none, and no limit.
        layers: Keywords for all layers of a kind, which a pattern may override; those for
            ``feed_forward`` hold inside blocks, too.
    """

    pattern: str
    vocab_size: int
    d_model: int = 64
    block: Literal["sequential", "parallel", "post_norm", "plain"] = "sequential"
    norm: Literal["layer", "rms", "none"] = "layer"
    norm_eps: float = 1e-5
    feed_forward: Literal["gelu", "gelu_exact", "relu", "swiglu", "none"] = "gelu"
    tie_embeddings: bool = True
    head_bias: bool = False
    max_len: int | None = None
    layers: Mapping[str, Mapping[str, Value]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_settings("the model configuration", self)
        for name in ("vocab_size", "d_model", "max_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
            if value is not None and value > _MOST:
                raise InputError(f"{name} must be at most {_MOST:,}, got {value}")
        if self.norm_eps <= 0:
            raise InputError(f"norm_eps must be positive, got {self.norm_eps}")
        if self.head_bias and self.tie_embeddings:
            raise InputError(
                "head_bias=True needs an output matrix of its own: set tie_embeddings=False"
            )

    @property
    def n_outputs(self) -> int:
        """Logits at a position."""
        return self.vocab_size

    def to_json(self) -> str:
        """The configuration as a JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[ConfigT], text: str) -> ConfigT:
        """Read a configuration written by :meth:`to_json`.

        Raises:
            InputError: If the text is not JSON, or names an unknown setting, or lacks one.

        Example:
            >>> config = ModelConfig("h3*2", vocab_size=256)
            >>> ModelConfig.from_json(config.to_json()) == config
            True
        """
        try:
            values: Any = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"the model configuration is not JSON: {error}") from error
        if not isinstance(values, dict):
            found = type(values).__name__
            raise InputError(f"the model configuration must be a JSON object, got a {found}")
        fields = dataclasses.fields(cls)
        known = [f.name for f in fields]
        for name in values:
            if name not in known:
                raise unknown_name("model setting", name, known)
        none = dataclasses.MISSING
        required = {f.name for f in fields if f.default is none and f.default_factory is none}
        if missing := required - set(values):
            raise InputError(f"the model configuration lacks {', '.join(sorted(missing))}")
        return cls(**values)
