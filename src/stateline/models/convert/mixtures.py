"""Decoders with mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and Granite 3 MoE."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Settings, family
from stateline.models.convert.decoders import (
    BIAS,
    MULTIPLIERS,
    NAMES,
    NORM,
    SILU,
    granite_scores,
    granite_scores_back,
)
from stateline.models.convert.hybrids import GRANITE_EXPERTS
from stateline.models.convert.parts import Experts, first_keywords, groups
from stateline.models.convert.qwen import (
    EXPERTS,
    LOSS,
    SHARED,
    SPARSE,
    expert_fields,
    sparse_layers,
    sparse_layers_back,
)
from stateline.models.convert.weights import flag

MIXTRAL = Experts(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
_EXPERTS = {
    "mixtral": MIXTRAL,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "granitemoe": GRANITE_EXPERTS,
}
_TYPES = {kind: NAMES._replace(experts=experts) for kind, experts in _EXPERTS.items()}
_KV_HEADS = {"mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}
_N_EXPERTS = {"qwen2_moe": 60, "qwen3_moe": 128}

_ENDS = (fields.VOCABULARY, fields.WIDTH, fields.TIED)
_READS = f"{fields.HEADS} {fields.ROPE}"
_WINDOWS = "sliding_window max_window_layers"  # read only with use_sliding_window
_QWEN = {**SILU, "use_sliding_window": (False,)}


def _all_sparse(
    experts: str, n: int, top_k: int, width: int | None = None
) -> tuple[fields.Field, ...]:
    """Fields of families whose layers all have experts."""
    return (
        fields.Field(experts, "moe.experts", n),
        fields.Field("num_experts_per_tok", "moe.top_k", top_k),
        fields.Field("intermediate_size", "moe.d_hidden", width),
    )


FIELDS = {
    "mixtral": fields.Fields(
        (*_ENDS, NORM._replace(default=1e-5), *_all_sparse("num_local_experts", 8, 2)),
        f"{_READS} sliding_window",
        SILU,
        f"{LOSS} router_jitter_noise",
    ),
    "qwen2_moe": fields.Fields(
        (
            *_ENDS,
            NORM,
            fields.HIDDEN._replace(default=5632),
            *expert_fields(4, 1408, normalise=False),
            SHARED._replace(default=5632),
        ),
        f"{_READS} {SPARSE} layer_types qkv_bias",
        _QWEN,
        f"{LOSS} {_WINDOWS}",
    ),
    "qwen3_moe": fields.Fields(
        (
            *_ENDS,
            NORM,
            NORM._replace(ours="attention.norm_eps"),
            BIAS,
            fields.HIDDEN._replace(default=6144),
            *expert_fields(8, 768, normalise=False),
        ),
        f"{_READS} {SPARSE} num_local_experts",
        _QWEN,
        f"{LOSS} {_WINDOWS}",
    ),
    "olmoe": fields.Fields(
        (
            *_ENDS,
            NORM._replace(default=1e-5),
            NORM._replace(ours="attention.norm_eps", default=1e-5),
            BIAS,
            *_all_sparse("num_experts", 64, 8),
            fields.Field("norm_topk_prob", "moe.normalise", False),
        ),
        _READS,
        {**SILU, "clip_qkv": (None,)},
        LOSS,
    ),
    "granitemoe": fields.Fields(
        (*_ENDS, NORM, BIAS, *MULTIPLIERS, *_all_sparse("num_local_experts", 8, 2)),
        f"{_READS} attention_multiplier",
        SILU,
        LOSS,
    ),
}
"""By ``model_type``."""


def mixture_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a decoder with experts, by ``model_type``."""
    model, layers = FIELDS[kind].read(settings)
    n, window = fields.layer_count(settings), None
    if kind == "qwen3_moe" and "num_local_experts" in settings:  # newer files have this name
        experts = settings["num_local_experts"]
        if settings.get("num_experts", experts) != experts:
            raise InputError(f"num_experts must be num_local_experts, {experts!r:.20}, or missing")
        settings = {**settings, "num_experts": experts}
    attention = {
        **fields.heads(settings, _KV_HEADS.get(kind)),
        **fields.rope(settings, base=1e6 if kind == "mixtral" else 1e4),
        **layers.pop("attention", {}),
    }
    sparse = [True] * n
    if kind in _N_EXPERTS:
        sparse = sparse_layers(settings, layers, _N_EXPERTS[kind])
    if kind == "qwen2_moe":
        fields.layer_types(settings, "layer_types", known=fields.FULL)
        attention["bias"] = "qkv" if flag(settings, "qkv_bias", True) else False
        layers["moe"]["gate_shared"] = True
    if kind in ("qwen3_moe", "olmoe"):
        attention["qk_norm"] = True if kind == "qwen3_moe" else "joint"
    if kind == "granitemoe":
        attention |= granite_scores(settings)
    if kind == "mixtral":
        window = settings.get("sliding_window")
    mixer = "attention" if window is None else "sliding_attention"
    layers |= fields.windowed([mixer], attention, window)
    return ModelConfig(**fields.composed([mixer] * n, sparse, layers), norm="rms", **model)


def mixture_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`mixture_config`."""
    blocks = groups(config, _TYPES[kind])
    attention = first_keywords(blocks, *NAMES.mixers)
    settings = FIELDS[kind].write(config, blocks)
    if kind in _N_EXPERTS:
        settings |= sparse_layers_back(blocks)
    elif any(layer.name != "moe" for _, layer in blocks):
        raise InputError(f"models of this family have experts in all layers, got {config.pattern}")
    if kind == "qwen2_moe":
        settings["qkv_bias"] = attention["bias"] == "qkv"
    if kind == "granitemoe":
        settings |= granite_scores_back(attention)
    if kind == "mixtral":
        settings["sliding_window"] = attention.get("window")
    return settings


_FUNCTIONS = mixture_config, mixture_settings
CONVERTERS = {
    kind: family(kind, title, _TYPES[kind], _FUNCTIONS, architecture)
    for kind, title, architecture in (
        ("mixtral", "Mixtral", "MixtralForCausalLM"),
        ("qwen2_moe", "Qwen2-MoE", "Qwen2MoeForCausalLM"),
        ("qwen3_moe", "Qwen3-MoE", "Qwen3MoeForCausalLM"),
        ("olmoe", "OLMoE", "OlmoeForCausalLM"),
        ("granitemoe", "Granite 3 MoE", "GraniteMoeForCausalLM"),
    )
}
"""By ``model_type``."""
