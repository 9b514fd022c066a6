"""The kinds of models, and how a configuration becomes a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from stateline.errors import InputError, unknown_name
from stateline.files import read_json_object
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import (
    ClassifierConfig,
    RegressorConfig,
    SequenceClassifier,
    SequenceHead,
    SequenceRegressor,
)
from stateline.settings import check_kind
from stateline.workers import memory_bytes

MAX_BYTES = 1 << 20
"""Upper limit on the size of a ``config.json``."""

AnyModel = LanguageModel | SequenceHead


class ModelKind(NamedTuple):
    """A kind of model: its configuration and its class."""

    config: type[ModelConfig]
    model: type[LanguageModel] | type[SequenceHead]


KINDS: Mapping[str, ModelKind] = {
    "language_model": ModelKind(ModelConfig, LanguageModel),
    "classifier": ModelKind(ClassifierConfig, SequenceClassifier),
    "regressor": ModelKind(RegressorConfig, SequenceRegressor),
}
"""Kinds of models by the value of ``kind`` in ``config.json``."""


def make_model(config: ModelConfig) -> AnyModel:
    """Build the model of a configuration, with new weights.

    Raises:
        InputError: If the configuration cannot be built, or its weights do not fit into memory.

    Example:
        >>> type(make_model(ClassifierConfig("s4d", d_model=8, vocab_size=4))).__name__
        'SequenceClassifier'
    """
    if torch.get_default_device().type != "meta":
        with torch.random.fork_rng(devices=[]):
            _check_memory(meta_model(config))
    return _build(config)


def meta_model(config: ModelConfig) -> AnyModel:
    """Build a model without memory for its weights, to count and to measure."""
    with torch.device("meta"):
        return _build(config)


PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that weights may have; narrower numbers are not supported."""


def check_precision(dtype: torch.dtype | None) -> None:
    """InputError for what is neither one of ``PRECISIONS`` nor ``None``."""
    if dtype not in (None, *PRECISIONS):
        known = ", ".join(map(str, PRECISIONS))
        raise InputError(
            f"dtype must be one of {known}, or None for that of the file, got {dtype!r}"
        )


def make_empty_model(config: ModelConfig) -> AnyModel:
    """Build a model without memory for its weights, to be filled by ``assign=True``.

    ``load_state_dict(tensors, assign=True)`` gives it all that is saved. Buffers that are not saved
    have memory and their initial values; to get these, a model that has any is built twice.
    """
    model = meta_model(config)
    unsaved = dict(model.named_buffers()).keys() - model.state_dict().keys()
    if unsaved:
        with torch.random.fork_rng(devices=[]):
            made = dict(_build(config).named_buffers())
        for name in unsaved:
            path, _, own = name.rpartition(".")
            model.get_submodule(path).register_buffer(own, made[name], persistent=False)
    return model


def _build(config: ModelConfig) -> AnyModel:
    check_kind("config", config, ModelConfig, "ModelConfig('h3', vocab_size=256)")
    model: AnyModel = KINDS[config.kind].model(config)  # type: ignore[arg-type]  # of that kind
    return model


def _check_memory(model: nn.Module) -> None:
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    if needed > (memory := memory_bytes()):
        raise InputError(
            f"the weights of the model need {needed / 2**30:,.1f} GiB, and this machine has "
            f"{memory / 2**30:,.1f} GiB of memory: lower d_model, vocab_size or the repeat counts"
        )


def read_config(path: Path) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        InputError: If the file cannot be read, or is no configuration of ours.
    """
    try:
        values = read_json_object(path, "model configuration", max_bytes=MAX_BYTES)
        kind = values.pop("kind", ModelConfig.kind)  # transformers writes language models only
        if not isinstance(kind, str) or kind not in KINDS:
            raise unknown_name("kind of model", str(kind), KINDS)
        if (family := values.get("model_type", "stateline")) != "stateline":
            raise InputError(
                f"{path} is of a published model, {family!r:.60}: read it with load_pretrained, or "
                "write it in our format with stateline convert"
            )
        return KINDS[kind].config.from_values(values)
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(
            f"{path} is damaged, or of another version of Stateline: {error}"
        ) from error


def float32_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that stay float32 in a model of lower precision."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if getattr(module, "keeps_float32", False)
        for name, _ in module.named_parameters(recurse=False)
    }
