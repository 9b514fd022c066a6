"""RecurrentGemma: the RG-LRU with sliding attention."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.parts import Names, Part, blocks, first_keywords
from stateline.models.convert.settings import (
    bias,
    heads,
    heads_back,
    layer_count,
    only,
    rope,
    rope_back,
    runs,
)
from stateline.models.convert.weights import count, number

Settings = Mapping[str, Any]

NAMES = Names(
    base="model.",
    embedding="model.embed_tokens",
    norm="model.final_norm",
    layer="model.layers.{}.",
    norms=("temporal_pre_norm", "channel_pre_norm"),
    qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
    out="temporal_block.o_proj",
    up=("mlp_block.gate_proj", "mlp_block.up_proj"),
    down="mlp_block.down_proj",
    inner="temporal_block.",
)
_OURS = {"recurrent": "rg_lru", "attention": "sliding_attention"}


def recurrent_gemma_config(settings: Settings) -> ModelConfig:
    """Our configuration of a RecurrentGemma.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    only(settings, hidden_activation="gelu_pytorch_tanh")
    d_model, n_heads = count(settings, "hidden_size"), count(settings, "num_attention_heads", 10)
    words = settings.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(words, list | tuple) or not words or not set(map(str, words)) <= set(_OURS):
        raise InputError(f"block_types must list recurrent and attention, got {words!r:.80}")
    width = settings.get("lru_width")
    attention = heads(settings) | rope(settings, fraction=0.5)
    attention["bias"] = bias({**settings, "out_bias": True}, "attention_bias", "out_bias")
    lru = {"d_inner": d_model if width is None else count(settings, "lru_width")}
    hidden = count(settings, "intermediate_size") // 2
    return ModelConfig(
        runs([_OURS[word] for word in islice(cycle(words), layer_count(settings))]),
        vocab_size=count(settings, "vocab_size"),
        d_model=d_model,
        norm="rms_offset",
        norm_eps=number(settings, "rms_norm_eps", 1e-6),
        feed_forward="geglu",
        tie_embeddings=settings.get("tie_word_embeddings", True),
        layers={
            "sliding_attention": {
                **attention,
                "window": count(settings, "attention_window_size", 2048),
            },
            "rg_lru": {**lru, "n_heads": n_heads, "d_conv": count(settings, "conv1d_width", 4)},
            "feed_forward": {"d_hidden": hidden, "bias": True},
        },
        embedding_multiplier=_normaliser(d_model),
        logits_soft_cap=number(settings, "logits_soft_cap", 30.0),
    )


def _normaliser(d_model: int) -> float:
    """Factor of the embeddings, which the official code rounds to bfloat16."""
    return float(torch.tensor(d_model**0.5, dtype=torch.bfloat16))


def recurrent_gemma_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, NAMES, tuple(_OURS.values()))


def recurrent_gemma_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`recurrent_gemma_config`.

    Raises:
        InputError: If the model does not consist of RG-LRUs, sliding attention and feed-forwards.
    """
    pairs = blocks(config, tuple(_OURS.values()))
    attention, lru = (first_keywords(pairs, name) for name in ("sliding_attention", "rg_lru"))
    words = {ours: official for official, ours in _OURS.items()}
    return {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "model_type": "recurrent_gemma",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": 2 * pairs[0][1].keywords["d_hidden"],
        "num_hidden_layers": len(pairs),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **heads_back(attention),
        **rope_back(attention),
        "attention_bias": attention["bias"] is True,
        "attention_window_size": attention["window"],
        "lru_width": lru["d_inner"] or config.d_model,
        "conv1d_width": lru["d_conv"],
        "block_types": [words[mixer.name] for mixer, _ in pairs],
        "logits_soft_cap": config.logits_soft_cap,
    }
