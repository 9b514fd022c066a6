"""Llama and its relatives: rotary attention and gated feed-forwards."""

from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Settings, family
from stateline.models.convert.parts import Layer, Names, first_keywords, groups
from stateline.models.convert.weights import flag, number
from stateline.models.pattern import Value

NAMES = Names(
    embedding="model.embed_tokens",
    mixers=("attention", "sliding_attention"),
    base="model.",
    norm="model.norm",
    layer="model.layers.{}.",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
_SLIDING = "sliding_attention"
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Default number of key heads by family; in other families, the number of query heads."""

GATED = (fields.VOCABULARY, fields.WIDTH, fields.HIDDEN, fields.TIED)
NORM = fields.Field("rms_norm_eps", "norm_eps", 1e-6)
BIAS = fields.Field("attention_bias", "attention.bias", False)
MULTIPLIERS = (
    fields.Field("embedding_multiplier", "embedding_multiplier", 1.0),
    fields.Field("residual_multiplier", "residual_multiplier", 1.0),
    fields.Field("logits_scaling", "logits_divisor", 1.0),
)
"""Granite's; the factor of its scores is another (:func:`granite_scores`)."""

SILU = {"hidden_act": ("silu",)}
_READS = f"{fields.HEADS} {fields.ROPE}"
_TYPES = f"{_READS} layer_types sliding_window"
_WINDOWS = f"{_TYPES} use_sliding_window max_window_layers"
_MLP_BIAS = fields.Field("mlp_bias", "feed_forward.bias", False)
FIELDS = {
    "llama": fields.Fields((*GATED, NORM, BIAS, _MLP_BIAS), _READS, SILU),
    "mistral": fields.Fields((*GATED, NORM), _TYPES, SILU),
    "qwen2": fields.Fields((*GATED, NORM), _WINDOWS, SILU),
    "qwen3": fields.Fields(
        (*GATED, NORM, BIAS, NORM._replace(ours="attention.norm_eps")),
        _WINDOWS,
        SILU,
    ),
    "granite": fields.Fields(
        (*GATED, NORM, BIAS, _MLP_BIAS, *MULTIPLIERS), f"{_READS} attention_multiplier", SILU
    ),
}
"""By ``model_type``."""


def decoder_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a Llama, Mistral, Qwen2, Qwen3 or Granite.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.
        kind: Which of them, by ``model_type``.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = decoder_config({
        ...     "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        ...     kind="llama")
        >>> config.pattern, config.layers["attention"]["n_kv_heads"]
        ('attention*2', 2)
    """
    model, layers = FIELDS[kind].read(settings)
    if kind == "qwen3":
        settings = {"head_dim": 128, **settings}
    attention: dict[str, Value] = {
        **fields.heads(settings, KV_HEADS.get(kind)),
        **fields.rope(settings),
    }
    attention |= layers.pop("attention", {})
    if kind == "qwen2":
        attention["bias"] = "qkv"
    if kind == "qwen3":
        attention["qk_norm"] = True
    if kind == "granite":
        attention |= granite_scores(settings)
    types, window = _types(settings, kind)
    if kind == "qwen3" and "sliding_attention" in types:
        raise InputError("sliding windows with normalised queries and keys are not supported")
    return ModelConfig(
        fields.runs(types),
        norm="rms",
        feed_forward="swiglu",
        layers=fields.windowed(types, attention, window) | layers,
        **model,
    )


def _types(settings: Settings, kind: str) -> tuple[list[str], int | None]:
    """Kind of each layer, and the window of the sliding layers."""
    n = fields.layer_count(settings)
    if kind in ("llama", "granite"):
        return ["attention"] * n, None
    window = None
    if kind == "mistral" or flag(settings, "use_sliding_window", False):
        window = settings.get("sliding_window", 4096)
    first = 0.0 if kind == "mistral" else number(settings, "max_window_layers", 28.0)
    derived = [_SLIDING if window is not None and i >= first else fields.FULL[0] for i in range(n)]
    types = fields.layer_types(settings, "layer_types", known=(*fields.FULL, _SLIDING)) or derived
    if window is None and _SLIDING in types:
        raise InputError("layer_types has sliding_attention, but no sliding_window is used")
    return ["attention" if name in fields.FULL else _SLIDING for name in types], window


def granite_scores(settings: Settings) -> dict[str, Value]:
    """The factor of Granite's scores, if it is not the usual one."""
    scale = number(settings, "attention_multiplier", 1.0)
    usual = max(1, fields.head_width(settings)) ** -0.5
    return {} if scale == usual else {"score_scale": scale}


def granite_scores_back(attention: Mapping[str, Any]) -> dict[str, float]:
    """The inverse of :func:`granite_scores`."""
    usual = float(attention["d_head"] ** -0.5)
    return {"attention_multiplier": attention["score_scale"] or usual}


def decoder_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`decoder_config`."""
    blocks = groups(config, NAMES)
    attention = first_keywords(blocks, *NAMES.mixers)
    settings = {
        **FIELDS[kind].write(config, blocks),
    }
    if kind == "granite":
        settings |= granite_scores_back(attention)
    if kind in ("mistral", "qwen2"):
        settings |= _windows([mixer for mixer, _ in blocks], kind)
    return settings


def _windows(mixers: list[Layer], kind: str) -> dict[str, Any]:
    windows = [m.keywords["window"] for m in mixers if m.name == "sliding_attention"]
    window = windows[0] if windows else None
    if kind == "mistral" and window is None:
        return {"sliding_window": None}
    types = ["full_attention" if m.name == "attention" else m.name for m in mixers]
    if kind == "mistral":  # transformers takes a Mistral with layer types as a Ministral
        mixed = {"model_type": "ministral", "layer_types": types}
        return {"sliding_window": window, **(mixed if len(set(types)) > 1 else {})}
    used = {"use_sliding_window": window is not None, "sliding_window": window}
    return {**used, "layer_types": types}


_FUNCTIONS = decoder_config, decoder_settings
CONVERTERS = {
    "llama": family("llama", "Llama", NAMES, _FUNCTIONS, "LlamaForCausalLM"),
    "mistral": family(
        "mistral",
        "Mistral and Ministral",
        NAMES,
        _FUNCTIONS,
        "MistralForCausalLM",
        ministral="MinistralForCausalLM",
    ),
    "qwen2": family("qwen2", "Qwen2", NAMES, _FUNCTIONS, "Qwen2ForCausalLM"),
    "qwen3": family("qwen3", "Qwen3", NAMES, _FUNCTIONS, "Qwen3ForCausalLM"),
    "granite": family("granite", "Granite 3", NAMES, _FUNCTIONS, "GraniteForCausalLM"),
}
"""By ``model_type``."""
