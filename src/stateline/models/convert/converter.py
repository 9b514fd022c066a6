"""A format of published models: how to recognise, read and write it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.fields import Fields, Settings
from stateline.models.convert.parts import Names, Part, read_parts, write_parts

Shapes = Mapping[str, tuple[int, ...]]


class Converter(NamedTuple):
    """A format of whole models.

    Attributes:
        names: The names of its tensors.
        config: Our configuration, from settings.
        settings: Settings, from our configuration.
        kinds: For formats of Hugging Face: each ``model_type``, and the class of its models.
        recognise: For other formats: whether settings (``{}`` if there are none) and names of
            tensors belong to it.
        parts: All tensors of a model, if :func:`~stateline.models.convert.decoder_parts` does not
            list them; from our configuration and the settings (``{}`` when writing).
        read_off: Settings that follow from the shapes of the tensors.
        one_way: Why the format cannot be written, if it cannot.
        file: Name of the weights file that the official program reads.
    """

    names: Names
    config: Callable[[Settings], ModelConfig]
    settings: Callable[[ModelConfig], dict[str, Any]] | None = None
    kinds: Mapping[str, str] = {}
    recognise: Callable[[Settings, Collection[str]], bool] | None = None
    parts: Callable[[ModelConfig, Settings], list[Part]] | None = None
    read_off: Callable[[Shapes], dict[str, Any]] | None = None
    one_way: str = ""
    file: str = "model.safetensors"

    def recognises(self, settings: Settings, tensors: Collection[str]) -> bool:
        """Whether settings and names of tensors belong to this format."""
        if self.recognise is None:
            return str(settings.get("model_type")) in self.kinds
        return self.recognise(settings, tensors)

    def completed(
        self, settings: Settings, tensors: Iterable[tuple[str, Tensor]]
    ) -> dict[str, Any]:
        """The settings, completed by the settings that follow from shapes of official tensors."""
        if self.read_off is None:
            return dict(settings)
        return {**self.read_off({name: tuple(t.shape) for name, t in tensors}), **settings}

    def official(self, settings: Settings) -> set[str]:
        """Names of the official tensors of a model."""
        parts = self._parts(self.config(settings), settings)
        return {name for part in parts for name in part.official}

    def read(
        self, tensors: Mapping[str, Tensor], settings: Settings, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Our tensors from official ones, one at a time, by completed settings.

        Each has memory of its own, and the given precision, by default that of the file.

        Raises:
            InputError: If tensors or settings are missing, left over or do not fit.
        """
        parts = self._parts(self.config(settings), settings)
        return read_parts(tensors, parts, self.names, dtype)

    def write(
        self, tensors: Mapping[str, Tensor], config: ModelConfig
    ) -> Iterator[tuple[str, Tensor]]:
        """Official tensors from ours, one at a time.

        Raises:
            InputError: If the format has no such model.
        """
        return write_parts(tensors, self._parts(config, {}), self.names)

    def write_settings(self, config: ModelConfig) -> dict[str, Any]:
        """The content of ``config.json``, from our configuration.

        Raises:
            InputError: If the format has no such model.
        """
        assert self.settings is not None
        settings = self.settings(config)
        if not self.kinds:
            return settings
        kind = settings.get("model_type", next(iter(self.kinds)))
        return {"architectures": [self.kinds[kind]], "model_type": kind, **settings}

    def _parts(self, config: ModelConfig, settings: Settings) -> list[Part]:
        return self.parts(config, settings) if self.parts else decoder_parts(config, self.names)


def family(names: Names, fields: Fields, **kinds: str) -> Converter:
    """A family of transformers.

    Args:
        names: The names of its tensors.
        fields: The fields of its ``config.json``.
        **kinds: Values of ``model_type``, the one that is written first; each with the class of its
            models.
    """
    config, settings = partial(fields.config, names=names), partial(fields.settings, names=names)
    return Converter(names, config, settings, kinds)
