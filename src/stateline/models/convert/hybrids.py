"""Hybrids of attention with Mamba, Mamba-2 or gated convolutions: Jamba, Bamba, Granite 4, LFM2."""

from collections.abc import Sequence
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings, family
from stateline.models.convert.decoders import (
    MULTIPLIERS,
    NAMES,
    NORM,
    SILU,
    granite_scores,
    granite_scores_back,
)
from stateline.models.convert.mamba import dt_rank, unlimited
from stateline.models.convert.parts import first_keywords, groups, inner_width
from stateline.models.convert.weights import count, flag, number

_BAMBA = NAMES._replace(
    mixers=("mamba2", "attention"),
    norm="model.final_layernorm",
    norms=("input_layernorm", "pre_ff_layernorm"),
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    inner="mamba.",
)
_GRANITE = NAMES._replace(
    mixers=("mamba2", "attention"),
    up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    inner="mamba.",
)
_JAMBA = _BAMBA._replace(mixers=("mamba", "attention"))
_LFM2 = NAMES._replace(
    mixers=("gated_conv", "attention"),
    norm="model.embedding_norm",
    norms=("operator_norm", "ffn_norm"),
    out="self_attn.out_proj",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    inner="conv.",
)


def _both(default: float) -> tuple[fields.Field, ...]:
    """The norms of the blocks and the norms in Mamba-2 use the same epsilon."""
    norm = NORM._replace(default=default)
    return norm, norm._replace(ours="mamba2.norm_eps")


_COMMON = (
    fields.VOCABULARY,
    fields.WIDTH,
    fields.TIED,
    fields.Field("mamba_d_state", "mamba2.d_state", 256),
    fields.Field("mamba_n_groups", "mamba2.n_groups", 1),
    fields.Field("mamba_d_conv", "mamba2.d_conv", 4),
    fields.Field("mamba_conv_bias", "mamba2.conv_bias", True),
)
_READS = f"{fields.HEADS} {fields.ROPE} mamba_n_heads mamba_d_head mamba_expand time_step_limit"
_TYPES = "layers_block_type layer_types"  # transformers prefers the first
_INERT = (
    "mamba_chunk_size output_router_logits router_aux_loss_coef use_mamba_kernels "
    "z_loss_coefficient"
)
_ONLY = {
    **SILU,
    "attention_bias": (False,),
    "mamba_proj_bias": (False,),
    "mlp_bias": (False,),
}
FIELDS = {
    "bamba": fields.Fields(
        (*_COMMON, *_both(1e-5), fields.HIDDEN),
        f"{_READS} attn_layer_indices attn_rotary_emb partial_rotary_factor",
        _ONLY,
        _INERT,
    ),
    "granitemoehybrid": fields.Fields(
        (
            *_COMMON,
            *_both(1e-6),
            fields.HIDDEN._replace(theirs="shared_intermediate_size"),
            *MULTIPLIERS,
        ),
        f"{_READS} {_TYPES} num_local_experts position_embedding_type attention_multiplier",
        _ONLY,
        f"{_INERT} intermediate_size num_experts_per_tok normalization_function",
    ),
    "jamba": fields.Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            fields.HIDDEN,
            fields.TIED,
            NORM,
            NORM._replace(ours="mamba.norm_eps"),
            fields.Field("mamba_d_state", "mamba.d_state", 16),
            fields.Field("mamba_d_conv", "mamba.d_conv", 4),
            fields.Field("mamba_expand", "mamba.expand", 2),
            fields.Field("mamba_conv_bias", "mamba.conv_bias", True),
            fields.Field("mamba_proj_bias", "mamba.bias", False),
        ),
        f"{fields.HEADS} mamba_dt_rank attn_layer_period attn_layer_offset num_experts "
        "expert_layer_period expert_layer_offset",
        SILU,
        "max_position_embeddings num_experts_per_tok output_router_logits router_aux_loss_coef "
        "use_associative_scan use_mamba_kernels use_mambapy",
    ),
    "lfm2": fields.Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            fields.Field("norm_eps", "norm_eps", 1e-5),
            fields.Field("norm_eps", "attention.norm_eps", 1e-5),
            fields.Field("conv_L_cache", "gated_conv.taps", 3),
            fields.Field("conv_bias", "gated_conv.bias", False),
        ),
        f"{fields.HEADS} {fields.ROPE} full_attn_idxs layer_types tie_embedding "
        "tie_word_embeddings block_auto_adjust_ff_dim block_ff_dim intermediate_size "
        "block_ffn_dim_multiplier block_multiple_of",
        # of older versions, which have the same also under other names
        inert="block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta "
        "use_pos_enc",
    ),
}
"""By ``model_type``."""


def mamba2_hybrid_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a Bamba, or of a Granite 4 hybrid without experts."""
    model, layers = FIELDS[kind].read(settings)
    granite = kind == "granitemoehybrid"
    if granite and settings.get("num_local_experts", 8):
        raise InputError(
            "mixtures of experts are not supported, got a granitemoehybrid with "
            f"num_local_experts={settings.get('num_local_experts', 8)}"
        )
    unlimited(settings, "time_step_limit")
    attention = fields.heads(settings, None if granite else 8)
    if not granite or settings.get("position_embedding_type") == "rope":
        # transformers reads no such factor in either family, only in rope_parameters of a Bamba
        given = settings if granite else {**settings, "partial_rotary_factor": 0.5}
        attention |= fields.rope(given, fraction=None if granite else 0.5)
    rotated = fields.head_width(settings) * float(attention.get("rotary_fraction") or 1)
    if settings.get("attn_rotary_emb", rotated) != rotated:
        raise InputError(
            f"attn_rotary_emb={settings['attn_rotary_emb']!r:.20} is not read by transformers, "
            f"which rotates {rotated:g} entries of each head"
        )
    if granite:
        attention |= granite_scores(settings)
    layers["attention"] = attention
    expand = count(settings, "mamba_expand", 2)
    inner, n_heads = expand * model["d_model"], count(settings, "mamba_n_heads", 128)
    d_head = inner // n_heads
    if settings.get("mamba_d_head", "auto") not in ("auto", d_head) or inner % n_heads:
        raise InputError(
            f"mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size, {inner}, got "
            f"{n_heads} * {settings.get('mamba_d_head', 'auto')!r:.20}"
        )
    layers["mamba2"] |= {"expand": float(expand), "d_head": d_head}
    layers["feed_forward"]["activation"] = "swiglu"
    return ModelConfig(
        _pattern(_full(settings, granite), "mamba2"),
        norm="rms",
        feed_forward="swiglu",
        layers=layers,
        **model,
    )


def _pattern(full: Sequence[bool], other: str) -> str:
    """The pattern of attention in some layers and a Mamba in the others, with feed-forwards."""
    return fields.runs([n for f in full for n in (["attention"] if f else [other, "feed_forward"])])


def _full(settings: Settings, granite: bool) -> list[bool]:
    """Whether each layer is attention."""
    if granite:
        known = (*fields.FULL, "linear_attention", "mamba")
        types = fields.layer_types(settings, *_TYPES.split(), known=known) or []
        return [name in fields.FULL for name in types] or [False] * fields.layer_count(settings)
    full = fields.layer_indices(settings, "attn_layer_indices") or []
    return [i in full for i in range(fields.layer_count(settings))]


def mamba2_hybrid_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`mamba2_hybrid_config`."""
    blocks = groups(config, _BAMBA)
    attention, mamba2 = (first_keywords(blocks, name) for name in ("attention", "mamba2"))
    is_attention = [mixer.name == "attention" for mixer, _ in blocks]
    settings: dict[str, Any] = {
        **FIELDS[kind].write(config, blocks),
        "mamba_n_heads": inner_width(mamba2, config) // mamba2["d_head"],
        "mamba_d_head": mamba2["d_head"],
        "mamba_expand": int(mamba2["expand"]),
    }
    if kind == "bamba":
        return settings | {"attn_layer_indices": [i for i, full in enumerate(is_attention) if full]}
    return {
        **settings,
        **granite_scores_back(attention),
        "position_embedding_type": "rope" if attention["position"] == "rope" else None,
        "num_local_experts": 0,
        "layer_types": ["full_attention" if f else "linear_attention" for f in is_attention],
    }


def jamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Jamba without experts."""
    model, layers = FIELDS["jamba"].read(settings)
    n, experts = fields.layer_count(settings), count(settings, "num_experts", 16)
    every, first = _every(settings, "expert_layer", 2, 1)
    if experts > 1 and first < n:
        raise InputError(
            f"mixtures of experts are not supported, got a jamba with num_experts={experts} in "
            f"every layer {every} from layer {first}"
        )
    every, first = _every(settings, "attn_layer", 8, 4)
    layers["attention"] = fields.heads(settings, 8)
    layers["mamba"] |= {
        "expand": float(layers["mamba"]["expand"]),
        "dt_rank": dt_rank(settings, "mamba_dt_rank"),
        "learned_norms": True,
    }
    layers["feed_forward"]["activation"] = "swiglu"
    return ModelConfig(
        _pattern([i % every == first for i in range(n)], "mamba"),
        norm="rms",
        feed_forward="swiglu",
        layers=layers,
        **model,
    )


def _every(settings: Settings, name: str, period: int, offset: int) -> tuple[int, int]:
    """The distance between layers of a kind, and the index of the first."""
    period, first = (
        count(settings, f"{name}_period", period),
        settings.get(f"{name}_offset", offset),
    )
    if type(first) is not int or not 0 <= first < period:
        raise InputError(f"{name}_offset must be from 0 to {period - 1}, got {first!r:.40}")
    return period, first


def jamba_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`jamba_config`."""
    blocks = groups(config, _JAMBA)
    full = [i for i, (mixer, _) in enumerate(blocks) if mixer.name == "attention"]
    settings = FIELDS["jamba"].write(config, blocks)
    return {
        **settings,
        "mamba_expand": int(settings["mamba_expand"]),
        "mamba_dt_rank": first_keywords(blocks, "mamba")["dt_rank"],
        "attn_layer_period": full[1] - full[0] if len(full) > 1 else len(blocks),
        "attn_layer_offset": full[0],
        "num_experts": 1,
    }


def lfm2_config(settings: Settings) -> ModelConfig:
    """Our configuration of an LFM2."""
    model, layers = FIELDS["lfm2"].read(settings)
    n = fields.layer_count(settings)
    full = fields.layer_indices(settings, "full_attn_idxs")
    full = list(range(n)) if full is None else full
    derived = ["full_attention" if i in full else "conv" for i in range(n)]
    types = fields.layer_types(settings, "layer_types", known=("full_attention", "conv")) or derived
    layers["attention"] |= {
        **fields.heads(settings, 8),
        **fields.rope(settings, base=1e6),
        "qk_norm": True,
    }
    layers["feed_forward"] = {"d_hidden": _lfm2_hidden(settings)}
    tied = "tie_embedding" if "tie_embedding" in settings else "tie_word_embeddings"
    return ModelConfig(
        fields.runs(["attention" if name == "full_attention" else "gated_conv" for name in types]),
        norm="rms",
        feed_forward="swiglu",
        tie_embeddings=flag(settings, tied, True),
        layers=layers,
        **model,
    )


def _lfm2_hidden(settings: Settings) -> int:
    """The actual hidden width, which the official code computes from the one in the settings."""
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


def lfm2_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`lfm2_config`."""
    blocks = groups(config, _LFM2)
    names = {"attention": "full_attention", "gated_conv": "conv"}
    return {
        **FIELDS["lfm2"].write(config, blocks),
        "intermediate_size": blocks[0][1].keywords["d_hidden"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_types": [names[mixer.name] for mixer, _ in blocks],
    }


_FUNCTIONS = mamba2_hybrid_config, mamba2_hybrid_settings
CONVERTERS = {
    "bamba": family("bamba", "Bamba", _BAMBA, _FUNCTIONS, "BambaForCausalLM"),
    "granitemoehybrid": family(
        "granitemoehybrid",
        "Granite 4 hybrids without experts",
        _GRANITE,
        _FUNCTIONS,
        "GraniteMoeHybridForCausalLM",
    ),
    "jamba": Converter(
        "Jamba without experts of Hugging Face transformers",
        _JAMBA,
        jamba_config,
        jamba_settings,
        {"jamba": "JambaForCausalLM"},
    ),
    "lfm2": Converter(
        "LFM2 of Hugging Face transformers",
        _LFM2,
        lfm2_config,
        lfm2_settings,
        {"lfm2": "Lfm2ForCausalLM"},
    ),
}
"""By ``model_type``."""
