"""RecurrentGemma: RG-LRU layers and sliding attention."""

from itertools import cycle, islice
from typing import Any

import torch

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.parts import Names, first_keywords, groups
from stateline.models.convert.weights import count, flag

NAMES = Names(
    embedding="model.embed_tokens",
    mixers=("rg_lru", "sliding_attention"),
    base="model.",
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
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        fields.TIED._replace(default=True),
        fields.Field("rms_norm_eps", "norm_eps", 1e-6),
        fields.Field("logits_soft_cap", "logits_soft_cap", 30.0),
        fields.Field("attention_window_size", "sliding_attention.window", 2048),
        fields.Field("num_attention_heads", "rg_lru.n_heads", 10),
        fields.Field("conv1d_width", "rg_lru.d_conv", 4),
    ),
    f"intermediate_size lru_width block_types attention_bias {fields.HEADS} {fields.PARTIAL_ROPE}",
    {"hidden_activation": ("gelu_pytorch_tanh",), "embeddings_scale_by_sqrt_dim": (True,)},
    "_block_types final_w_init_variance_scale w_init_variance_scale",
)


def recurrent_gemma_config(settings: Settings) -> ModelConfig:
    """Our configuration of a RecurrentGemma."""
    model, layers = FIELDS.read(settings)
    words = settings.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(words, list | tuple) or not words or not set(map(str, words)) <= set(_OURS):
        raise InputError(f"block_types must list recurrent and attention, got {words!r:.80}")
    layers["sliding_attention"] |= {
        **fields.heads(settings),
        **fields.rope(settings, fraction=0.5),
        "bias": True if flag(settings, "attention_bias", False) else "out",
    }
    if settings.get("lru_width") is not None:
        layers["rg_lru"]["d_inner"] = count(settings, "lru_width")
    layers["feed_forward"] = {"d_hidden": count(settings, "intermediate_size") // 2, "bias": True}
    return ModelConfig(
        fields.runs([_OURS[word] for word in islice(cycle(words), fields.layer_count(settings))]),
        norm="rms_offset",
        feed_forward="geglu",
        layers=layers,
        embedding_multiplier=_normaliser(model["d_model"]),
        **model,
    )


def _normaliser(d_model: int) -> float:
    """Factor of the embeddings, which the official code rounds to bfloat16."""
    return float(torch.tensor(d_model**0.5, dtype=torch.bfloat16))


def recurrent_gemma_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`recurrent_gemma_config`."""
    blocks = groups(config, NAMES)
    attention, lru = (first_keywords(blocks, n) for n in ("sliding_attention", "rg_lru"))
    words = {ours: official for official, ours in _OURS.items()}
    return {
        **FIELDS.write(config, blocks),
        "intermediate_size": 2 * blocks[0][1].keywords["d_hidden"],
        "attention_bias": attention["bias"] is True,
        "lru_width": lru["d_inner"],
        "block_types": [words[mixer.name] for mixer, _ in blocks],
    }


CONVERTERS = {
    "recurrent_gemma": Converter(
        "RecurrentGemma of Hugging Face transformers",
        NAMES,
        recurrent_gemma_config,
        recurrent_gemma_settings,
        {"recurrent_gemma": "RecurrentGemmaForCausalLM"},
    )
}
"""By ``model_type``."""
