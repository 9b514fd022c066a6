"""The models of "Repeat After Me", from the weights of its official code."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stateline.layers.attention import Position
from stateline.models.config import ModelConfig
from stateline.models.convert.gpt_neox import gpt_neox_config, gpt_neox_weights
from stateline.models.convert.weights import assemble, rename
from stateline.models.language_model import LanguageModel


def load_repeat_after_me(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    position: Position,
    masked_heads: int | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """One of its Transformers: GPT-NeoX with another position scheme.

    Args:
        tensors: Its state dict, by official names.
        settings: Its configuration, as for a GPT-NeoX model.
        position: ``none``, ``alibi``, ``hard_alibi``, or ``rope``, which is GPT-NeoX itself.
        masked_heads: For ``hard_alibi``.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode. Unlike the official Hard-ALiBi, it decodes on its state.

    Raises:
        InputError: If tensors are missing, left over or of another shape, or the configuration
            asks for what is not there.

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, section 2.2 and appendix A.
    """
    config = gpt_neox_config(settings)
    scheme = {
        "n_heads": config.layers["attention"]["n_heads"],
        "bias": config.layers["attention"]["bias"],
        "position": position,
        "masked_heads": masked_heads,
        "double_count": True,  # not in the paper: see Attention
    }
    if position != "rope":
        config = dataclasses.replace(config, layers={**config.layers, "attention": scheme})
    return assemble(config, gpt_neox_weights(tensors, settings), device=device)


def load_repeat_after_me_lstm(
    tensors: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
) -> LanguageModel:
    """Its LSTM: an embedding, LSTM layers and an output map, without norms or residuals.

    Args:
        tensors: Its state dict, by official names; sizes are those of its tensors.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If tensors are missing, left over or of another shape.

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, appendix A.
    """
    n_layers = max(1, sum(name.startswith("lstm.weight_hh_l") for name in tensors))
    names = {"word_embeddings.weight": "embedding.weight"}
    names |= {f"head.{part}": f"head.{part}" for part in ("weight", "bias")}
    for layer in range(n_layers):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            names[f"lstm.{part}_l{layer}"] = f"stack.layers.0.{part}_l{layer}"
    ours = rename(tensors, names)
    vocab_size, d_model = ours["embedding.weight"].shape
    # Differs from the official code, which drops 65 % of what passes from one LSTM layer to the
    # next: that is of training, and nothing here drops anything.
    config = ModelConfig(
        f"lstm(n_layers={n_layers})",
        vocab_size=vocab_size,
        d_model=d_model,
        block="plain",
        norm="none",
        tie_embeddings=False,
        head_bias=True,
    )
    return assemble(config, ours, device=device)
