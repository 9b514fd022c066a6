"""Llama and its relatives: rotary attention and gated feed-forwards."""

from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.parts import Layer, Names, Part, blocks
from stateline.models.convert.settings import (
    FULL,
    granite_scores,
    heads,
    heads_back,
    layer_count,
    layer_types,
    multipliers_back,
    only,
    rope,
    rope_back,
    runs,
    with_multipliers,
)
from stateline.models.convert.weights import count, number
from stateline.models.pattern import Value

Settings = Mapping[str, Any]

NAMES = Names(
    base="model.",
    embedding="model.embed_tokens",
    norm="model.norm",
    layer="model.layers.{}.",
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
MIXERS = ("attention", "sliding_attention")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Heads of keys where the settings do not say; elsewhere those of queries."""


def decoder_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Llama, Mistral, Qwen2, Qwen3 or Granite.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = decoder_config({
        ...     "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> config.pattern, config.layers["attention"]["n_kv_heads"]
        ('attention*2', 2)
    """
    kind = settings["model_type"]
    only(settings, hidden_act="silu")
    if kind == "qwen3":
        settings = {"head_dim": 128, **settings}
    attention: dict[str, Value] = {**heads(settings, KV_HEADS.get(kind)), **rope(settings)}
    if kind == "qwen2":
        attention["bias"] = "qkv"
    elif kind != "mistral" and settings.get("attention_bias"):
        attention["bias"] = True
    if kind == "qwen3":
        attention |= {"qk_norm": True, "norm_eps": number(settings, "rms_norm_eps", 1e-6)}
    if kind == "granite":
        attention |= granite_scores(settings)
    types, window = _types(settings, kind)
    layers: dict[str, dict[str, Value]] = {}
    if "attention" in types:
        layers["attention"] = attention
    if "sliding_attention" in types:
        if kind == "qwen3":
            raise InputError("sliding windows with normalised queries and keys are not supported")
        layers["sliding_attention"] = {**attention, "window": window}
    layers["feed_forward"] = {"d_hidden": count(settings, "intermediate_size")}
    if kind in ("llama", "granite") and settings.get("mlp_bias"):
        layers["feed_forward"]["bias"] = True
    config = ModelConfig(
        runs(types),
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "hidden_size"),
        norm="rms",
        norm_eps=number(settings, "rms_norm_eps", 1e-6),
        feed_forward="swiglu",
        tie_embeddings=settings.get("tie_word_embeddings", False),
        layers=layers,
    )
    return with_multipliers(config, settings) if kind == "granite" else config


def _types(settings: Settings, kind: str) -> tuple[list[str], int | None]:
    """Kind of each layer, and the window of those that have one."""
    n = layer_count(settings)
    if kind in ("llama", "granite"):
        return ["attention"] * n, None
    if kind == "mistral":
        window = settings.get("sliding_window", 4096)
        return ["attention" if window is None else "sliding_attention"] * n, window
    window = settings.get("sliding_window", 4096) if settings.get("use_sliding_window") else None
    first = number(settings, "max_window_layers", 28.0) if window is not None else n
    derived = ["sliding_attention" if i >= first else "full_attention" for i in range(n)]
    types = layer_types(settings, "layer_types") or derived
    return ["attention" if name in FULL else "sliding_attention" for name in types], window


def decoder_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, NAMES, MIXERS)


def decoder_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`decoder_config`.

    Raises:
        InputError: If the model does not consist of attention and feed-forwards.
    """
    pairs = blocks(config, MIXERS)
    mixer, feed_forward = pairs[0]
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": feed_forward.keywords["d_hidden"],
        "num_hidden_layers": len(pairs),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **heads_back(mixer.keywords),
        **rope_back(mixer.keywords),
    }
    if kind in ("llama", "granite"):
        settings["mlp_bias"] = feed_forward.keywords["bias"]
    if kind in ("llama", "granite", "qwen3"):
        settings["attention_bias"] = mixer.keywords["bias"] is True
    if kind == "granite":
        settings |= multipliers_back(config, mixer.keywords)
    if kind in ("mistral", "qwen2"):
        settings |= _windows([mixer for mixer, _ in pairs], kind)
    return settings


def _windows(mixers: list[Layer], kind: str) -> dict[str, Any]:
    windows = [m.keywords["window"] for m in mixers if m.name == "sliding_attention"]
    window = windows[0] if windows else None
    if kind == "mistral":
        return {"sliding_window": window}
    types = ["full_attention" if m.name == "attention" else m.name for m in mixers]
    used = {"use_sliding_window": window is not None, "sliding_window": window}
    return {**used, "layer_types": types}
