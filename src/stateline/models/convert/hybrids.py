"""Hybrids of attention with Mamba-2 or gated convolutions: Bamba, Granite 4 and LFM2."""

from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.mamba2 import default_head
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.decoders import NAMES
from stateline.models.convert.mamba import unlimited
from stateline.models.convert.parts import Part, blocks, first_keywords
from stateline.models.convert.settings import (
    FULL,
    granite_scores,
    heads,
    heads_back,
    layer_count,
    layer_indices,
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

BAMBA = NAMES._replace(
    norm="model.final_layernorm",
    norms=("input_layernorm", "pre_ff_layernorm"),
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    inner="mamba.",
)
GRANITE = NAMES._replace(
    up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", inner="mamba."
)
LFM2 = NAMES._replace(
    norm="model.embedding_norm",
    norms=("operator_norm", "ffn_norm"),
    out="self_attn.out_proj",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    inner="conv.",
)
_MIXERS = ("mamba2", "attention")
_HIDDEN = {"bamba": "intermediate_size", "granitemoehybrid": "shared_intermediate_size"}


def mamba2_hybrid_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Bamba, or of a Granite 4 hybrid without experts.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    kind = settings["model_type"]
    granite = kind == "granitemoehybrid"
    only(settings, hidden_act="silu", attention_bias=False, mamba_proj_bias=False, mlp_bias=False)
    if granite and settings.get("num_local_experts", 8):
        raise InputError(
            "mixtures of experts are not supported, got a granitemoehybrid with "
            f"num_local_experts={settings.get('num_local_experts', 8)}"
        )
    unlimited(settings, "time_step_limit")
    d_model, eps = count(settings, "hidden_size"), number(settings, "rms_norm_eps", 1e-5)
    attention = heads(settings, None if granite else 8)
    if not granite or settings.get("position_embedding_type") == "rope":
        attention |= rope(settings, fraction=1.0 if granite else 0.5)
    if granite:
        attention |= granite_scores(settings)
    mixers = ["attention" if full else "mamba2" for full in _full(settings)]
    config = ModelConfig(
        runs([n for m in mixers for n in ([m] if m == "attention" else [m, "feed_forward"])]),
        vocab_size=count(settings, "vocab_size"),
        d_model=d_model,
        norm="rms",
        norm_eps=eps,
        feed_forward="swiglu",
        tie_embeddings=settings.get("tie_word_embeddings", False),
        layers={
            "attention": attention,
            "mamba2": _mamba2(settings, d_model, eps),
            "feed_forward": {"activation": "swiglu", "d_hidden": count(settings, _HIDDEN[kind])},
        },
    )
    return with_multipliers(config, settings) if granite else config


def _full(settings: Settings) -> list[bool]:
    """Whether each layer is attention."""
    types = layer_types(settings, "layer_types", "layers_block_type")
    if types is not None:
        return [name in FULL for name in types]
    full = layer_indices(settings, "attn_layer_indices") or []
    return [i in full for i in range(layer_count(settings))]


def _mamba2(settings: Settings, d_model: int, eps: float) -> dict[str, Value]:
    expand, n_heads = count(settings, "mamba_expand", 2), count(settings, "mamba_n_heads", 128)
    return {
        "d_state": count(settings, "mamba_d_state", 256),
        "d_head": expand * d_model // n_heads,
        "n_groups": count(settings, "mamba_n_groups", 1),
        "d_conv": count(settings, "mamba_d_conv", 4),
        "expand": float(expand),
        "norm_eps": eps,
    }


def bamba_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, BAMBA, _MIXERS)


def granite_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, GRANITE, _MIXERS)


def mamba2_hybrid_settings(config: ModelConfig, kind: str, conv_bias: bool) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`mamba2_hybrid_config`.

    Raises:
        InputError: If the model does not consist of Mamba-2, attention and feed-forwards.
    """
    pairs = blocks(config, _MIXERS)
    attention, mamba2 = (first_keywords(pairs, name) for name in ("attention", "mamba2"))
    inner = int(mamba2["expand"] * config.d_model)
    d_head = mamba2["d_head"] or default_head(inner)
    is_attention = [mixer.name == "attention" for mixer, _ in pairs]
    settings: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        _HIDDEN[kind]: pairs[0][1].keywords["d_hidden"],
        "num_hidden_layers": len(pairs),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **heads_back(attention),
        **rope_back(attention),
        "mamba_n_heads": inner // d_head,
        "mamba_d_head": d_head,
        "mamba_n_groups": mamba2["n_groups"],
        "mamba_d_state": mamba2["d_state"],
        "mamba_d_conv": mamba2["d_conv"],
        "mamba_expand": int(mamba2["expand"]),
        "mamba_conv_bias": conv_bias,
    }
    if kind == "bamba":
        indices = [i for i, full in enumerate(is_attention) if full]
        return {"architectures": ["BambaForCausalLM"], **settings, "attn_layer_indices": indices}
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **settings,
        **multipliers_back(config, attention),
        "position_embedding_type": "rope" if attention["position"] == "rope" else None,
        "num_local_experts": 0,
        "layer_types": ["full_attention" if f else "linear_attention" for f in is_attention],
    }


def lfm2_config(settings: Settings) -> ModelConfig:
    """Our configuration of an LFM2.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    n, eps = layer_count(settings), number(settings, "norm_eps", 1e-5)
    full = layer_indices(settings, "full_attn_idxs")
    full = list(range(n)) if full is None else full
    derived = ["full_attention" if i in full else "conv" for i in range(n)]
    types = layer_types(settings, "layer_types") or derived
    if unknown := sorted(set(types) - {"full_attention", "conv"}):
        raise InputError(f"layers of an LFM2 are full_attention or conv, got {unknown[0]!r}")
    attention = {**heads(settings, 8), **rope(settings, base=1_000_000.0)}
    return ModelConfig(
        runs(["attention" if name == "full_attention" else "gated_conv" for name in types]),
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "hidden_size"),
        norm="rms",
        norm_eps=eps,
        feed_forward="swiglu",
        tie_embeddings=settings.get("tie_embedding", settings.get("tie_word_embeddings", True)),
        layers={
            "attention": {**attention, "qk_norm": True, "norm_eps": eps},
            "gated_conv": {
                "taps": count(settings, "conv_L_cache", 3),
                "bias": bool(settings.get("conv_bias", False)),
            },
            "feed_forward": {"d_hidden": _lfm2_hidden(settings)},
        },
    )


def _lfm2_hidden(settings: Settings) -> int:
    """The hidden width, which the official code derives from the stated one."""
    name = "block_ff_dim" if "block_ff_dim" in settings else "intermediate_size"
    stated = count(settings, name)
    if not settings.get("block_auto_adjust_ff_dim", True):
        return stated
    hidden = int(2 * stated / 3)
    if settings.get("block_ffn_dim_multiplier", 1.0) is None:
        return hidden
    factor = number(settings, "block_ffn_dim_multiplier", 1.0)
    if not 0 < factor < 1e6:
        raise InputError(f"block_ffn_dim_multiplier must be positive, got {factor}")
    multiple = count(settings, "block_multiple_of", 256)
    return -(-int(factor * hidden) // multiple) * multiple


def lfm2_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, LFM2, ("gated_conv", "attention"))


def lfm2_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`lfm2_config`.

    Raises:
        InputError: If the model does not consist of gated convolutions, attention and
            feed-forwards.
    """
    pairs = blocks(config, ("gated_conv", "attention"))
    attention, conv = (first_keywords(pairs, name) for name in ("attention", "gated_conv"))
    names = {"attention": "full_attention", "gated_conv": "conv"}
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": pairs[0][1].keywords["d_hidden"],
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": len(pairs),
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **heads_back(attention),
        **rope_back(attention),
        "conv_L_cache": conv["taps"],
        "conv_bias": conv["bias"],
        "layer_types": [names[mixer.name] for mixer, _ in pairs],
    }
