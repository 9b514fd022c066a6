"""Check that a configuration stays the same when it is written in a format and read again."""

from typing import Any

from stateline.errors import InputError
from stateline.layers.dropout import Dropout
from stateline.models.config import ModelConfig
from stateline.models.factory import meta_model
from stateline.settings import Choice

_TRAINING = ("balance", "correction_rate", "dropout")
"""Settings of layers without effect outside training."""


def check_expressible(config: ModelConfig, again: ModelConfig) -> None:
    """Compare a model with the one that its official settings describe.

    Args:
        config: Of the model.
        again: Read from the settings that were written for it.

    Raises:
        InputError: If they differ in anything but the values of parameters.
    """
    wanted, got = _structure(config), _structure(again)
    for name in sorted(wanted.keys() | got.keys()):
        if wanted.get(name) != got.get(name):
            raise InputError(
                f"models of this family cannot express {config.pattern!r}: {name} would be "
                f"{got.get(name)}, not {wanted.get(name)}"
            )


def _structure(config: ModelConfig) -> dict[str, Any]:
    """Everything except parameter values that distinguishes models outside training."""
    model = meta_model(config)
    found: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "max_len",
            "norm_eps",
            "embedding_multiplier",
            "logits_divisor",
            "logits_soft_cap",
        )
    }
    for path, module in model.named_modules():
        if isinstance(module, Dropout):  # has no effect outside training
            continue
        found[path or "model"] = type(module).__name__
        settings = getattr(module, "settings", None)  # of a layer that has a dataclass of them
        own = {**vars(settings), **vars(module)} if settings else vars(module)
        for name, value in own.items():
            if isinstance(value, int | float | str | Choice) and name not in _TRAINING:
                found[f"{path}.{name}".removeprefix(".")] = value
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return found | shapes
