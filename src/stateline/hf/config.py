"""The configuration of a model, as transformers stores it."""

import dataclasses
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.pattern import Item, parse_pattern

_NAMES = [field.name for field in dataclasses.fields(ModelConfig)]
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


class StatelineConfig(PreTrainedConfig):
    """The settings of a :class:`~stateline.ModelConfig`, and what transformers adds to them.

    One ``config.json`` serves both libraries: it holds all settings under the same names, including
    default values.
    """

    model_type = "stateline"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "tie_word_embeddings": "tie_embeddings",
        "max_position_embeddings": "max_len",
    }

    def __init__(self, *, use_cache: bool = True, **settings: Any) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in settings.items()}
        later = (*_NAMES, "num_hidden_layers")
        super().__init__(**{name: value for name, value in given.items() if name not in later})
        # transformers also makes a configuration without arguments
        own = dataclasses.asdict(ModelConfig("h3", vocab_size=256))
        own |= {"use_cache": use_cache, **dict.fromkeys(_TOKENS)}
        for name, default in own.items():
            setattr(self, name, given.get(name, default))
        if "num_hidden_layers" in given:
            self.num_hidden_layers = given["num_hidden_layers"]

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers in the pattern, where a wrapper and its core count as one.

        Raises:
            InputError: If it is set to another number.
        """
        return _count(parse_pattern(self.pattern))

    @num_hidden_layers.setter
    def num_hidden_layers(self, number: int) -> None:
        if number != self.num_hidden_layers:
            raise InputError(
                f"num_hidden_layers must be {self.num_hidden_layers}, the number of layers of "
                f"{self.pattern!r}, got {number!r}: change pattern instead"
            )

    @classmethod
    def of(cls, config: ModelConfig, **settings: Any) -> "StatelineConfig":
        """The configuration of a model, with settings of transformers such as ``pad_token_id``."""
        return cls(**dataclasses.asdict(config), **settings)

    def model_config(self) -> ModelConfig:
        """The configuration for :class:`~stateline.LanguageModel`.

        Raises:
            InputError: If a setting cannot be used.
        """
        return ModelConfig(**{name: getattr(self, name) for name in _NAMES})

    def to_diff_dict(self) -> dict[str, Any]:
        """The settings that are written to ``config.json``."""
        return {**super().to_diff_dict(), **{name: getattr(self, name) for name in _NAMES}}


def _count(items: tuple[Item, ...]) -> int:
    return sum(item.repeat * (1 if item.name else _count(item.core)) for item in items)
