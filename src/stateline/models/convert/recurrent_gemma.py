"""RecurrentGemma: RG-LRU layers and sliding attention."""

from itertools import cycle, islice
from typing import Any

import torch

from stateline.errors import InputError
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.parts import Names, Written
from stateline.models.convert.weights import count

_NAMES = Names(
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


def _read(draft: Draft) -> None:
    settings = draft.settings
    words = settings.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(words, list | tuple) or not words or not set(map(str, words)) <= set(_OURS):
        raise InputError(f"block_types must list recurrent and attention, got {words!r:.80}")
    depth = fields.layer_count(settings)
    draft.mixers = [_OURS[word] for word in islice(cycle(words), depth)]
    if settings.get("lru_width") is not None:
        draft.put("rg_lru.d_inner", count(settings, "lru_width"))
    draft.put("feed_forward.d_hidden", count(settings, "intermediate_size") // 2)
    # the official code rounds the factor to bfloat16
    factor = torch.tensor(draft.model["d_model"] ** 0.5, dtype=torch.bfloat16)
    draft.put("embedding_multiplier", float(factor))


def _write(model: Written) -> dict[str, Any]:
    words = {ours: official for official, ours in _OURS.items()}
    return {
        "intermediate_size": 2 * model.first("feed_forward")["d_hidden"],
        "lru_width": model.first("rg_lru")["d_inner"],
        "block_types": [words[mixer.name] for mixer, _ in model.blocks],
    }


_FIELDS = Fields(
    (
        *fields.TIED,
        field("attention_bias", "attention.bias", False, {True: True, False: "out"}),
        *fields.norms(1e-6),
        field("logits_soft_cap", "logits_soft_cap", 30.0),
        field("attention_window_size", "sliding_attention.window", 2048),
        *fields.several("rg_lru", "num_attention_heads=n_heads:10 conv1d_width=d_conv:4"),
        fields.heads(),
        fields.rope(fraction=0.5),
        Rule("intermediate_size lru_width block_types", _read, _write),
    ),
    {"hidden_activation": ("gelu_pytorch_tanh",), "embeddings_scale_by_sqrt_dim": (True,)},
    "_block_types final_w_init_variance_scale w_init_variance_scale",
    {"norm": "rms_offset", "feed_forward": "geglu", "feed_forward.bias": True},
)

CONVERTERS = {
    "recurrent_gemma": family(_NAMES, _FIELDS, recurrent_gemma="RecurrentGemmaForCausalLM")
}
"""By ``model_type``."""
