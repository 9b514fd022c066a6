"""The models of "Repeat After Me", from the weights of its official code."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.mixers.attention import Position
from stateline.models.config import ModelConfig
from stateline.models.convert.gpt_neox import (
    gpt_neox_config,
    gpt_neox_settings,
    gpt_neox_weights,
)
from stateline.models.convert.weights import assemble, rename, some_names
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import parse_pattern


def load_repeat_after_me(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    position: Position,
    masked_heads: int | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Read one of its Transformers: GPT-NeoX with another position scheme.

    Args:
        tensors: Its state dict, by official names.
        settings: Its configuration, as for a GPT-NeoX model.
        position: ``none``, ``alibi``, ``hard_alibi``, or ``rope``, which is GPT-NeoX itself.
        masked_heads: For ``hard_alibi``.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode. Unlike the official Hard-ALiBi, it decodes from its state.

    Raises:
        InputError: If tensors are missing, left over or of another shape, or the configuration
            asks for what is not there.

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 2.2 and appendix A.
    """
    given = {**settings, "position": position, "masked_heads": masked_heads}
    weights = gpt_neox_weights(tensors, settings)
    return assemble(repeat_after_me_config(given), weights, device=device)


def repeat_after_me_config(settings: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of one of its Transformers.

    Args:
        settings: As for GPT-NeoX, with ``position`` and, for ``hard_alibi``, ``masked_heads``.
    """
    position = settings["position"]
    config = gpt_neox_config(settings, rotary=position == "rope")
    if position == "rope":
        return config
    attention = {
        **config.layers["attention"],
        "position": position,
        "masked_heads": settings.get("masked_heads"),
        "double_count": True,  # not in the paper: see Attention
    }
    return dataclasses.replace(config, layers={**config.layers, "attention": attention})


def repeat_after_me_settings(config: ModelConfig) -> dict[str, Any]:
    """The settings of one of its Transformers; the inverse of :func:`repeat_after_me_config`.

    Raises:
        InputError: If it has no such model.
    """
    settings = gpt_neox_settings(config, rotary=False)
    del settings["architectures"], settings["model_type"]  # transformers has other positions
    attention = config.layers.get("attention", {})
    position = {"position": attention.get("position", "none")}
    return settings | position | {"masked_heads": attention.get("masked_heads")}


def load_repeat_after_me_lstm(
    tensors: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> LanguageModel:
    """Read its LSTM: an embedding, LSTM layers and an output map, without norms or residuals.

    Args:
        tensors: Its state dict, by official names.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If tensors are missing, left over or of another shape.

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, appendix A.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights = repeat_after_me_lstm_weights(tensors)
    return assemble(repeat_after_me_lstm_config(shapes), weights, device=device)


def repeat_after_me_lstm_config(shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Our configuration of its LSTM, read off the shapes of the tensors.

    Raises:
        InputError: If its embedding is not a matrix.
    """
    if len(shape := shapes["word_embeddings.weight"]) != 2:
        raise InputError(f"word_embeddings.weight must be a matrix, got the shape {shape}")
    vocab_size, d_model = shape
    # Differs from the official code, which applies dropout of 65 % between LSTM layers in
    # training: there is no dropout here.
    return ModelConfig(
        f"lstm(n_layers={_n_layers(shapes)})",
        vocab_size=vocab_size,
        d_model=d_model,
        block="plain",
        norm="none",
        tie_embeddings=False,
        head_bias=True,
    )


def repeat_after_me_lstm_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of its LSTM; see :func:`load_repeat_after_me_lstm`."""
    return rename(tensors, _lstm_names(_n_layers(tensors)))


def repeat_after_me_lstm_tensors(
    tensors: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """Its tensors from ours; the inverse of :func:`repeat_after_me_lstm_weights`.

    Raises:
        InputError: If a tensor has no place there.
    """
    (item, *_) = parse_pattern(config.pattern)
    names = _lstm_names(int(str(item.keywords.get("n_layers", 1))))
    if left_over := sorted(tensors.keys() ^ set(names.values())):
        raise InputError(
            "the LSTM of Repeat After Me is lstm(n_layers=...) in a plain block, without norms, "
            f"got {config.pattern!r}: {some_names(left_over)} does not fit"
        )
    return {official: tensors[ours] for official, ours in names.items()}


def _lstm_names(n_layers: int) -> dict[str, str]:
    """Our name of each official one."""
    names = {"word_embeddings.weight": "embedding.weight"}
    names |= {f"head.{part}": f"head.{part}" for part in ("weight", "bias")}
    for layer in range(n_layers):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            names[f"lstm.{part}_l{layer}"] = f"stack.layers.0.{part}_l{layer}"
    return names


def _n_layers(names: Iterable[str]) -> int:
    return max(1, sum(name.startswith("lstm.weight_hh_l") for name in names))
