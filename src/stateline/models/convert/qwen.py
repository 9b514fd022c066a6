"""Qwen3-Next and Qwen3.5 without experts: gated delta nets and gated attention."""

from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.parts import Part, blocks, first_keywords
from stateline.models.convert.settings import (
    FULL,
    heads,
    heads_back,
    layer_count,
    layer_indices,
    layer_types,
    only,
    rope,
    rope_back,
    runs,
)
from stateline.models.convert.weights import count, number
from stateline.models.pattern import Value

Settings = Mapping[str, Any]

_DELTA = DECODER._replace(inner="linear_attn.")
NAMES = {
    "qwen3_next": _DELTA._replace(delta=("in_proj_qkvz", "in_proj_ba")),
    "qwen3_5_text": _DELTA._replace(delta=("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")),
}
MIXERS = ("gated_delta_net", "attention")
_ARCHITECTURES = {"qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}
_KV_HEADS = {"qwen3_next": 2, "qwen3_5_text": 4}
_SIZES = {
    "n_heads": ("linear_num_value_heads", 32),
    "n_key_heads": ("linear_num_key_heads", 16),
    "d_key": ("linear_key_head_dim", 128),
    "d_conv": ("linear_conv_kernel_dim", 4),
}
"""Keywords of the delta net, their official names, and the values where they are missing."""


def qwen_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Qwen3-Next or Qwen3.5 without experts.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    kind, n_layers = settings["model_type"], layer_count(settings)
    only(settings, hidden_act="silu")
    if kind == "qwen3_next":
        _check_dense(settings, n_layers)
    settings = {"head_dim": 256, **settings}
    eps = number(settings, "rms_norm_eps", 1e-6)
    every = count(settings, "full_attention_interval", 4)
    derived = [
        "linear_attention" if number % every else "attention" for number in range(1, n_layers + 1)
    ]
    types = layer_types(settings, "layer_types") or derived
    attention: dict[str, Value] = {
        **heads(settings, _KV_HEADS[kind]),
        **rope(settings, fraction=0.25),
    }
    attention |= {"qk_norm": "offset", "norm_eps": eps, "gated": True}
    if settings.get("attention_bias"):
        attention["bias"] = True
    delta: dict[str, Value] = {ours: count(settings, *theirs) for ours, theirs in _SIZES.items()}
    d_key = count(settings, *_SIZES["d_key"])
    delta["expand_v"] = count(settings, "linear_value_head_dim", 128) / d_key
    return ModelConfig(
        runs(["attention" if name in FULL else "gated_delta_net" for name in types]),
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "hidden_size"),
        norm="rms_offset",
        norm_eps=eps,
        feed_forward="swiglu",
        tie_embeddings=settings.get("tie_word_embeddings", False),
        layers={
            "attention": attention,
            "gated_delta_net": {**delta, "norm_eps": eps},
            "feed_forward": {"d_hidden": count(settings, "intermediate_size")},
        },
    )


def _check_dense(settings: Settings, n_layers: int) -> None:
    """Raise InputError if a layer has experts."""
    experts, dense = settings.get("num_experts", 512), layer_indices(settings, "mlp_only_layers")
    step = count(settings, "decoder_sparse_step", 1)
    if experts and set(range(step - 1, n_layers, step)) - set(dense or []):
        raise InputError(
            f"mixtures of experts are not supported, got a qwen3_next with num_experts={experts}"
        )


def qwen_names(config: ModelConfig, kind: str) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, NAMES[kind], MIXERS)


def qwen_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`qwen_config`.

    Raises:
        InputError: If the model does not consist of gated delta nets, attention and feed-forwards.
    """
    pairs = blocks(config, MIXERS)
    attention, delta = (first_keywords(pairs, name) for name in ("attention", "gated_delta_net"))
    delta = {**delta, "n_key_heads": delta["n_key_heads"] or delta["n_heads"]}
    delta["d_key"] = delta["d_key"] or config.d_model // delta["n_heads"]
    words = {"attention": "full_attention", "gated_delta_net": "linear_attention"}
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": pairs[0][1].keywords["d_hidden"],
        "num_hidden_layers": len(pairs),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **heads_back(attention),
        **rope_back(attention),
        "attention_bias": attention["bias"] is True,
        **{theirs: delta[ours] for ours, (theirs, _) in _SIZES.items()},
        "linear_value_head_dim": round(delta["expand_v"] * delta["d_key"]),
        "layer_types": [words[mixer.name] for mixer, _ in pairs],
        **({"num_experts": 0} if kind == "qwen3_next" else {}),
    }
