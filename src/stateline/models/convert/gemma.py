"""Gemma: embeddings that are scaled, and norms whose weights are offsets from one.

Gemma 2 and 3 also have norms after the branches, and windows; Gemma 2 has soft caps, Gemma 3 rotary
positions of two kinds.
"""

from functools import partial
from typing import Any

from stateline.errors import InputError
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoders import NAMES
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.parts import Written
from stateline.models.convert.weights import count, number, section

_SANDWICH = NAMES._replace(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    norms_after=("post_attention_layernorm", "post_feedforward_layernorm"),
    blocks=("sandwich",),
)
_ROPES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Of each kind of layer: the field with the base in older files, and its default."""


def _types(draft: Draft, every: int) -> list[str]:
    """One of so many layers sees all positions."""
    depth = range(fields.layer_count(draft.settings))
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in depth]


def _types_gemma3(draft: Draft) -> list[str]:
    """Every sixth layer sees all positions, or as a field of older files says."""
    return _types(draft, count(draft.settings, "sliding_window_pattern", 6))


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
        draft.layers[fields.SLIDING[word]].update(fields.rope_keywords(found))


def _write_rope(model: Written) -> dict[str, Any]:
    found = {}
    for word in _ROPES:
        own = fields.SLIDING[word]
        layer = model.first(*((own,) if model.numbers(own) else NAMES.mixers))
        found[word] = fields.rope_back(layer).get("rope_parameters")
    return {"rope_parameters": found}


def _read_scale(draft: Draft) -> None:
    scale = number(draft.settings, "query_pre_attn_scalar", 256)
    if scale <= 0:
        raise InputError(f"query_pre_attn_scalar must be positive, got {scale}")
    draft.put("attention.score_scale", scale**-0.5)


def _write_scale(model: Written) -> dict[str, Any]:
    attention = model.first(*NAMES.mixers)
    scale = attention["score_scale"] or attention["d_head"] ** -0.5
    return {"query_pre_attn_scalar": round(scale**-2)}


def _multiply(draft: Draft) -> None:
    draft.put("embedding_multiplier", count(draft.settings, "hidden_size") ** 0.5)


def _soft_cap(official: str, ours: str, default: float | None) -> Rule:
    """A field with a soft cap, which may be null."""

    def read(draft: Draft) -> None:
        if draft.settings.get(official, default) is not None:
            draft.put(ours, number(draft.settings, official, default or 0.0))

    def write(model: Written) -> dict[str, Any]:
        if ours == "logits_soft_cap":
            return {official: model.config.logits_soft_cap}
        return {official: model.first(*NAMES.mixers)["soft_cap"]}

    return Rule(official, read, write)


_GEMMA = (
    *fields.TIED,
    fields.BIAS,
    Rule("", _multiply),
)
_SCALE = Rule("query_pre_attn_scalar", _read_scale, _write_scale)
_WINDOW = field("sliding_window", "sliding_attention.window", 4096)
_KINDS = {"full_attention": "attention", "sliding_attention": "sliding_attention"}
_FIXED = {"norm": "rms_offset", "feed_forward": "geglu"}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_TANH = {"hidden_activation": ("gelu_pytorch_tanh",), **_CAUSAL}
_FIELDS = {
    "gemma": Fields(
        (*_GEMMA, fields.hidden(24576), *fields.norms(1e-6), fields.heads(16, 256), fields.rope()),
        {"hidden_act": ("gelu_pytorch_tanh", "gelu"), **_CAUSAL},
        "hidden_activation",
        _FIXED,
    ),
    "gemma2": Fields(
        (
            *_GEMMA,
            fields.hidden(9216),
            *fields.norms(1e-6),
            fields.heads(4, 256),
            _WINDOW,
            fields.kinds(_KINDS, partial(_types, every=2)),
            _SCALE,
            fields.rope(),
            _soft_cap("attn_logit_softcapping", "attention.soft_cap", 50.0),
            _soft_cap("final_logit_softcapping", "logits_soft_cap", 30.0),
        ),
        _TANH,
        "cache_implementation hidden_act",
        {**_FIXED, "block": "sandwich"},
    ),
    "gemma3_text": Fields(
        (
            *_GEMMA,
            fields.hidden(9216),
            *fields.norms(1e-6, "attention"),
            fields.heads(4, 256),
            _WINDOW,
            fields.kinds(_KINDS, _types_gemma3, others="sliding_window_pattern"),
            _SCALE,
            Rule(f"{fields.ROPE} rope_local_base_freq", _read_rope, _write_rope),
            _soft_cap("final_logit_softcapping", "logits_soft_cap", None),
        ),
        # transformers caps the scores of Gemma 3 in one of its kernels, not in the others
        {**_TANH, "attn_logit_softcapping": (None,)},
        "_sliding_window_pattern cache_implementation hidden_act",
        {**_FIXED, "block": "sandwich", "attention.qk_norm": "offset"},
    ),
}

CONVERTERS = {
    "gemma": family(NAMES, _FIELDS["gemma"], gemma="GemmaForCausalLM"),
    "gemma2": family(_SANDWICH, _FIELDS["gemma2"], gemma2="Gemma2ForCausalLM"),
    "gemma3_text": family(_SANDWICH, _FIELDS["gemma3_text"], gemma3_text="Gemma3ForCausalLM"),
}
"""By ``model_type``."""
