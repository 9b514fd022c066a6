"""Gemma 3: norms before and after the branches, windows, and rotary positions of two kinds."""

from typing import Any

from stateline.errors import InputError
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoders import NAMES
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.parts import Written
from stateline.models.convert.weights import count, number, section

_NAMES = NAMES._replace(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    norms_after=("post_attention_layernorm", "post_feedforward_layernorm"),
    blocks=("sandwich",),
)
_ROPES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Of each kind of layer: the field with the base in older files, and its default."""


def _types(draft: Draft) -> list[str]:
    """Every sixth layer sees all positions, or as a field of older files says."""
    every = count(draft.settings, "sliding_window_pattern", 6)
    depth = range(fields.layer_count(draft.settings))
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in depth]


def _read_rope(draft: Draft) -> None:
    """Rotary positions of both kinds; ``rope_scaling`` of older files is that of full layers."""
    given = section(draft.settings, "rope_parameters")
    if other := sorted(name for name in given if name not in _ROPES):
        raise InputError(f"rope_parameters must be of {' and '.join(_ROPES)}, got {other[0]}")
    longest = count(draft.settings, "max_position_embeddings", 131_072)
    for word, (older, base) in _ROPES.items():
        own = {"rope_theta": draft.settings.get(older, base), **section(given, word)}
        if word == "full_attention":
            own |= section(draft.settings, "rope_scaling")
        found = {"max_position_embeddings": longest, "rope_parameters": own}
        # sliding layers would have the scaling of full ones
        keywords = {"rope_scaling": "none", **fields.rope_keywords(found)}
        draft.layers[fields.SLIDING[word]].update(keywords)
    fields.read_length(draft)


def _write_rope(model: Written) -> dict[str, Any]:
    found = {}
    for word in _ROPES:
        own = fields.SLIDING[word]
        layer = model.first(*((own,) if model.numbers(own) else NAMES.mixers))
        found[word] = fields.rope_back(layer).get("rope_parameters")
    return {"rope_parameters": found, **fields.write_length(model)}


def _read_scale(draft: Draft) -> None:
    scale = number(draft.settings, "query_pre_attn_scalar", 256)
    if scale <= 0:
        raise InputError(f"query_pre_attn_scalar must be positive, got {scale}")
    draft.put("attention.score_scale", scale**-0.5)
    draft.put("embedding_multiplier", count(draft.settings, "hidden_size") ** 0.5)


def _write_scale(model: Written) -> dict[str, Any]:
    attention = model.first(*NAMES.mixers)
    scale = attention["score_scale"] or attention["d_head"] ** -0.5
    return {"query_pre_attn_scalar": round(scale**-2)}


def _read_cap(draft: Draft) -> None:
    if draft.settings.get("final_logit_softcapping") is not None:
        draft.put("logits_soft_cap", number(draft.settings, "final_logit_softcapping", 0.0))


_GEMMA3 = Fields(
    (
        *fields.TIED,
        fields.hidden(9216),
        *fields.norms(1e-6, "attention"),
        fields.BIAS,
        fields.heads(4, 256),
        field("sliding_window", "sliding_attention.window", 4096),
        fields.kinds(
            {"full_attention": "attention", "sliding_attention": "sliding_attention"},
            _types,
            others="sliding_window_pattern",
        ),
        Rule(f"{fields.ROPE} rope_local_base_freq", _read_rope, _write_rope),
        Rule("query_pre_attn_scalar", _read_scale, _write_scale),
        Rule(
            "final_logit_softcapping",
            _read_cap,
            lambda model: {"final_logit_softcapping": model.config.logits_soft_cap},
        ),
    ),
    {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    "_sliding_window_pattern cache_implementation hidden_act",
    {
        "norm": "rms_offset",
        "block": "sandwich",
        "feed_forward": "geglu",
        "attention.qk_norm": "offset",
    },
)

CONVERTERS = {"gemma3_text": family(_NAMES, _GEMMA3, gemma3_text="Gemma3ForCausalLM")}
"""By ``model_type``."""
