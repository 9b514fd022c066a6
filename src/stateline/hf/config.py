"""The configuration of a model, as transformers stores it."""

import dataclasses
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from stateline.models.config import ModelConfig

_FIELDS = {
    field.name: None if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(ModelConfig)
}
"""Names of our settings and their defaults; there is none for the settings that must be given."""

_NEEDED = {"pattern": "h3", "vocab_size": 256}
"""Defaults of settings that ours lack: transformers makes a configuration without arguments."""

_Settings = type(
    "_Settings",
    (PreTrainedConfig,),
    {
        "__module__": __name__,
        "__annotations__": dict.fromkeys(_FIELDS, Any),
        "__no_type_check__": True,  # transformers passes more than the signature says
        **_FIELDS,
        **_NEEDED,
    },
)


class StatelineConfig(_Settings):  # type: ignore[misc, valid-type]
    """The settings of a :class:`~stateline.ModelConfig`, and what transformers adds to them.

    One ``config.json`` serves both libraries: it holds the settings under the same names, and all
    of them, also settings with default values.
    """

    model_type = "stateline"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "tie_word_embeddings": "tie_embeddings",
        "max_position_embeddings": "max_len",
    }

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def of(cls, config: ModelConfig, **settings: Any) -> "StatelineConfig":
        """The configuration of a model, with settings of transformers such as ``pad_token_id``."""
        return cls(**dataclasses.asdict(config), **settings)

    def model_config(self) -> ModelConfig:
        """The configuration for :class:`~stateline.LanguageModel`.

        Raises:
            InputError: If a setting cannot be used.
        """
        values = {name: getattr(self, name) for name in _FIELDS}
        return ModelConfig(**{**values, "layers": self.layers or {}})

    def to_diff_dict(self) -> dict[str, Any]:
        """The settings that are written to ``config.json``."""
        settings = {name: getattr(self, name) for name in _FIELDS}
        return {**super().to_diff_dict(), **settings}
