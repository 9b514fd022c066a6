"""How large a model is, before it is built."""

import dataclasses

import torch

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

WIDTH_STEP = 4
"""Widths that are tried are multiples of this."""


def meta_model(config: ModelConfig) -> LanguageModel:
    """The model without memory for its weights: enough to count and to measure."""
    with torch.device("meta"):
        return LanguageModel(config)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied ones count once.

    Example:
        >>> config = ModelConfig("attention", vocab_size=10, d_model=8, feed_forward="none")
        >>> count_parameters(config)
        368
    """
    return sum(p.numel() for p in meta_model(config).parameters())


def match_width(config: ModelConfig, parameters: int) -> ModelConfig:
    """The same model at the width whose number of parameters is nearest to the wanted one.

    Widths that do not suit a layer (heads must divide them) are passed over.

    Args:
        config: The model; its own ``d_model`` is ignored.
        parameters: Wanted number of parameters.

    Returns:
        The configuration with ``d_model`` set.

    Raises:
        InputError: If the model cannot be built at any width.
    """
    best, best_distance, failure = config, float("inf"), None
    width, too_large = 0, 0
    while too_large < 8:  # a few more, since the next larger ones may not suit
        width += WIDTH_STEP
        candidate = dataclasses.replace(config, d_model=width)
        try:
            distance = count_parameters(candidate) - parameters
        except InputError as error:
            failure = error
            if width > 64 * WIDTH_STEP and best_distance == float("inf"):
                raise failure from None
            continue
        too_large += distance > 0
        if abs(distance) < best_distance:
            best, best_distance = candidate, abs(distance)
    return best
