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
from stateline.models.convert.parts import Experts, first_keywords, groups, inner_width
from stateline.models.convert.weights import count, flag, number

GRANITE_EXPERTS = Experts(
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear",),
    "block_sparse_moe.output_linear",
    (("shared_mlp.input_linear",), "shared_mlp.output_linear"),
)
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
    experts=GRANITE_EXPERTS,
    inner="mamba.",
)
_JAMBA = _BAMBA._replace(
    mixers=("mamba", "attention"),
    experts=Experts(
        "feed_forward.router",
        ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
        "feed_forward.experts.{}.down_proj",
    ),
)
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
_LFM2_MOE = _LFM2._replace(
    experts=Experts(
        "feed_forward.gate",
        ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        "feed_forward.experts.{}.w2",
        correction="feed_forward.expert_bias",
    )
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
_LFM2_FIELDS = (
    fields.VOCABULARY,
    fields.WIDTH,
    fields.Field("norm_eps", "norm_eps", 1e-5),
    fields.Field("norm_eps", "attention.norm_eps", 1e-5),
    fields.Field("conv_L_cache", "gated_conv.taps", 3),
    fields.Field("conv_bias", "gated_conv.bias", False),
)
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
            fields.HIDDEN._replace(theirs="shared_intermediate_size", default=1024),
            fields.Field("shared_intermediate_size", "moe.d_shared", 1024),
            fields.Field("intermediate_size", "moe.d_hidden", 11008),
            fields.Field("num_experts_per_tok", "moe.top_k", 2),
            *MULTIPLIERS,
        ),
        f"{_READS} {_TYPES} num_local_experts position_embedding_type attention_multiplier",
        _ONLY,
        f"{_INERT} normalization_function",
    ),
    "jamba": fields.Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            fields.HIDDEN,
            fields.HIDDEN._replace(ours="moe.d_hidden"),
            fields.Field("num_experts_per_tok", "moe.top_k", 2),
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
        "max_position_embeddings output_router_logits router_aux_loss_coef "
        "use_associative_scan use_mamba_kernels use_mambapy",
    ),
    "lfm2": fields.Fields(
        _LFM2_FIELDS,
        f"{fields.HEADS} {fields.ROPE} full_attn_idxs layer_types tie_embedding "
        "tie_word_embeddings block_auto_adjust_ff_dim block_ff_dim intermediate_size "
        "block_ffn_dim_multiplier block_multiple_of",
        # of older versions, which have the same also under other names
        inert="block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta "
        "use_pos_enc",
    ),
    "lfm2_moe": fields.Fields(
        (
            *_LFM2_FIELDS,
            fields.HIDDEN._replace(default=7168),
            fields.Field("num_experts", "moe.experts", 32),
            fields.Field("num_experts_per_tok", "moe.top_k", 4),
            fields.Field("moe_intermediate_size", "moe.d_hidden", 1792),
            fields.Field("norm_topk_prob", "moe.normalise", True),
            fields.Field("routed_scaling_factor", "moe.scale", 1.0),
            fields.Field("use_expert_bias", "moe.correction", True),
        ),
        f"{fields.HEADS} {fields.ROPE} layer_types num_dense_layers tie_embedding "
        "tie_word_embeddings",
        inert="output_router_logits",
    ),
}
"""By ``model_type``."""


def mamba2_hybrid_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a Bamba or a Granite 4 hybrid."""
    granite = kind == "granitemoehybrid"
    experts = granite and settings.get("num_local_experts", 8) != 0
    model, layers = FIELDS[kind].read(settings, "" if experts else "moe")
    if experts:
        layers["moe"]["experts"] = count(settings, "num_local_experts", 8)
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
    mixers = ["attention" if full else "mamba2" for full in _full(settings, granite)]
    found = fields.composed(mixers, [experts] * len(mixers), layers)
    return ModelConfig(**found, norm="rms", **model)


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
    blocks = groups(config, _GRANITE if kind == "granitemoehybrid" else _BAMBA)
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
        "num_local_experts": blocks[0][1].keywords.get("experts", 0),
        "layer_types": ["full_attention" if f else "linear_attention" for f in is_attention],
    }


def jamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Jamba."""
    model, layers = FIELDS["jamba"].read(settings)
    n, experts = fields.layer_count(settings), count(settings, "num_experts", 16)
    every, first = _every(settings, "expert_layer", 2, 1)
    sparse = [experts > 1 and i % every == first for i in range(n)]
    every, first = _every(settings, "attn_layer", 8, 4)
    layers["moe"] |= {"experts": experts, "normalise": False}
    layers["attention"] = fields.heads(settings, 8)
    layers["mamba"] |= {
        "expand": float(layers["mamba"]["expand"]),
        "dt_rank": dt_rank(settings, "mamba_dt_rank"),
        "learned_norms": True,
    }
    mixers = ["attention" if i % every == first else "mamba" for i in range(n)]
    return ModelConfig(**fields.composed(mixers, sparse, layers), norm="rms", **model)


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
    sparse = [i for i, (_, layer) in enumerate(blocks) if layer.name == "moe"]
    settings = FIELDS["jamba"].write(config, blocks)
    return {
        **settings,
        "mamba_expand": int(settings["mamba_expand"]),
        "mamba_dt_rank": first_keywords(blocks, "mamba")["dt_rank"],
        **_every_back("attn_layer", full, len(blocks)),
        **_every_back("expert_layer", sparse or [0], len(blocks)),
        "num_experts": blocks[sparse[0]][1].keywords["experts"] if sparse else 1,
    }


def _every_back(name: str, found: Sequence[int], n_layers: int) -> dict[str, int]:
    """The inverse of :func:`_every`, from the numbers of the layers of a kind."""
    period = found[1] - found[0] if len(found) > 1 else n_layers
    return {f"{name}_period": period, f"{name}_offset": found[0]}


def lfm2_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of an LFM2."""
    model, layers = FIELDS[kind].read(settings)
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
    sparse = [False] * n
    if kind == "lfm2":
        layers["feed_forward"] = {"d_hidden": _lfm2_hidden(settings)}
    else:
        layers["moe"] |= {"scores": "sigmoid", "normalise_eps": 1e-6}
        sparse = [i >= _dense_layers(settings) for i in range(n)]
    tied = "tie_embedding" if "tie_embedding" in settings else "tie_word_embeddings"
    mixers = ["attention" if name == "full_attention" else "gated_conv" for name in types]
    found = fields.composed(mixers, sparse, layers)
    return ModelConfig(**found, norm="rms", tie_embeddings=flag(settings, tied, True), **model)


def _dense_layers(settings: Settings) -> int:
    """Number of layers without experts, which may be 0."""
    n = settings.get("num_dense_layers", 2)
    return 0 if n == 0 else count(settings, "num_dense_layers", 2)


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


def lfm2_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`lfm2_config`."""
    blocks = groups(config, _LFM2 if kind == "lfm2" else _LFM2_MOE)
    names = {"attention": "full_attention", "gated_conv": "conv"}
    dense = [layer.keywords["d_hidden"] for _, layer in blocks if layer.name != "moe"]
    own = {"num_dense_layers": len(dense)}
    if kind == "lfm2":
        own = {"intermediate_size": dense[0], "block_auto_adjust_ff_dim": False}
    return {
        **FIELDS[kind].write(config, blocks),
        **own,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_types": [names[mixer.name] for mixer, _ in blocks],
    }


_FUNCTIONS = mamba2_hybrid_config, mamba2_hybrid_settings
CONVERTERS = {
    "bamba": family("bamba", "Bamba", _BAMBA, _FUNCTIONS, "BambaForCausalLM"),
    "granitemoehybrid": family(
        "granitemoehybrid",
        "Granite 4 hybrids",
        _GRANITE,
        _FUNCTIONS,
        "GraniteMoeHybridForCausalLM",
    ),
    "jamba": Converter(
        "Jamba of Hugging Face transformers",
        _JAMBA,
        jamba_config,
        jamba_settings,
        {"jamba": "JambaForCausalLM"},
    ),
    "lfm2": family("lfm2", "LFM2", _LFM2, (lfm2_config, lfm2_settings), "Lfm2ForCausalLM"),
    "lfm2_moe": family(
        "lfm2_moe",
        "LFM2 with experts",
        _LFM2_MOE,
        (lfm2_config, lfm2_settings),
        "Lfm2MoeForCausalLM",
    ),
}
"""By ``model_type``."""
