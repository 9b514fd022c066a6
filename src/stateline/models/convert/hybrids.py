"""Hybrids of attention with Mamba, Mamba-2 or gated convolutions.

Bamba, Granite 4, Falcon-H1, Jamba, Nemotron-H, LFM2.
"""

import math
from collections.abc import Sequence
from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.mamba2 import Multipliers
from stateline.models.build import MAX_LAYERS
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoders import (
    GRANITE,
    LOSS,
    MULTIPLIERS,
    NAMES,
    shared_expert,
)
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.mamba import dt_rank, unlimited
from stateline.models.convert.parts import Experts, Names, Written, inner_width
from stateline.models.convert.weights import count, flag, number
from stateline.pattern import parse_value

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
    experts=GRANITE,
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
_NEMOTRON = Names(
    embedding="backbone.embeddings",
    mixers=("mamba2", "attention", "feed_forward", "moe"),
    base="backbone.",
    norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    norms=("norm",),
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    experts=Experts(
        "mixer.gate",
        ("mixer.experts.{}.up_proj",),
        "mixer.experts.{}.down_proj",
        (("mixer.shared_experts.up_proj",), "mixer.shared_experts.down_proj"),
        correction="mixer.gate.e_score_correction_bias",
    ),
    inner="mixer.",
)

_PLAIN = {"attention_bias": (False,), "mamba_proj_bias": (False,), "mlp_bias": (False,)}
_WORDS = {"linear_attention": "mamba2", "full_attention": "attention"}


def _mamba2(stated: str = "", default: int = 0) -> tuple[Rule, ...]:
    """Fields of Mamba-2.

    Args:
        stated: The field with the number of inner channels; without one, ``mamba_expand`` says it.
        default: Its value if it is missing; null means that ``mamba_expand`` says it.
    """

    def read(draft: Draft) -> None:
        settings, width = draft.settings, draft.model["d_model"]
        unlimited(settings, "time_step_limit")
        expand, n_heads = count(settings, "mamba_expand", 2), count(settings, "mamba_n_heads", 128)
        inner, wanted = expand * width, "mamba_expand * hidden_size"
        if stated and settings.get(stated, default) is not None:
            inner, wanted = count(settings, stated, default), stated
        given = settings.get("mamba_d_head", "auto")
        if inner % n_heads or given not in ("auto", inner // n_heads):
            raise InputError(
                f"mamba_n_heads * mamba_d_head must be {wanted}, {inner}, got {n_heads} * "
                f"{given!r:.20}"
            )
        draft.layers["mamba2"] |= {"expand": inner / width, "d_head": inner // n_heads}

    def write(model: Written) -> dict[str, Any]:
        mamba2 = model.first("mamba2")
        inner = inner_width(mamba2, model.config)
        size = {stated: inner} if stated else {"mamba_expand": int(mamba2["expand"])}
        heads = {"mamba_n_heads": inner // mamba2["d_head"], "mamba_d_head": mamba2["d_head"]}
        return {**heads, **size}

    official = f"mamba_n_heads mamba_d_head mamba_expand time_step_limit {stated}"
    return (
        *fields.several(
            "mamba2",
            "mamba_d_state=d_state:256 mamba_n_groups=n_groups:1 mamba_d_conv=d_conv:4 "
            "mamba_conv_bias=conv_bias:True",
        ),
        Rule(official, read, write),
    )


def _read_bamba(draft: Draft) -> None:
    settings = draft.settings
    full = fields.layer_indices(settings, "attn_layer_indices") or []
    depth = range(fields.layer_count(settings))
    draft.mixers = ["attention" if i in full else "mamba2" for i in depth]
    # transformers reads this factor only in rope_parameters
    given = {**settings, "partial_rotary_factor": 0.5}
    draft.layers["attention"] |= fields.rope_keywords(given, fraction=0.5)
    rope = parse_value(str(draft.layers["attention"]["position"]))
    fraction = float(str(rope.keywords.get("fraction", 1)))
    # transformers does not read it
    fields.agree(settings, attn_rotary_emb=round(fields.head_width(settings) * fraction))


def _write_bamba(model: Written) -> dict[str, Any]:
    rope = fields.rope_back(model.first("attention"))
    return {"attn_layer_indices": model.numbers("attention"), **rope}


def _read_granite(draft: Draft) -> None:
    settings = draft.settings
    experts = count(settings, "num_local_experts", 8, least=0)
    draft.put("moe.experts", experts)
    draft.sparse = [experts > 0] * fields.layer_count(settings)
    if settings.get("position_embedding_type") == "rope":
        draft.layers["attention"] |= fields.rope_keywords(settings)


def _write_granite(model: Written) -> dict[str, Any]:
    rope = fields.rope_back(model.first("attention"))
    return {
        "position_embedding_type": "rope" if rope else None,
        "num_local_experts": model.blocks[0][1].keywords.get("experts", 0),
        **rope,
    }


_SSM = ("z", "u", "b", "c", "step")


def _read_factors(draft: Draft) -> None:
    settings = draft.settings
    factor = number(settings, "ssm_in_multiplier", 1.0)
    inner = [factor * own for own in _numbers(settings, "ssm_multipliers", len(_SSM))]
    factors = dict(zip(_SSM, inner, strict=True), out=number(settings, "ssm_out_multiplier", 1.0))
    draft.put("mamba2.multipliers", str(Multipliers(**factors)))
    gate, down = _numbers(settings, "mlp_multipliers", 2)
    draft.layers["feed_forward"] |= {"gate_scale": gate, "out_scale": down}
    # the input's factor multiplies queries, keys and values
    before = number(settings, "attention_in_multiplier", 1.0)
    usual = _usual(fields.head_width(settings))
    scale = number(settings, "key_multiplier", 1.0) * before * before * usual
    draft.layers["attention"] |= {
        "out_scale": before * number(settings, "attention_out_multiplier", 1.0),
        "score_scale": None if scale == usual else scale,
    }
    after = number(settings, "lm_head_multiplier", 1.0)
    if not 0 < after < math.inf:
        raise InputError(f"lm_head_multiplier must be positive, got {after}")
    draft.put("logits_divisor", 1 / after)
    if draft.layers["mamba2"]["normalise"] and flag(settings, "mamba_norm_before_gate", True):
        raise InputError("mamba_norm_before_gate must be false where mamba_rms_norm is true")
    draft.mixers = ["parallel(mamba2, attention)"] * fields.layer_count(settings)


def _usual(d_head: int) -> float:
    return float(max(1, d_head) ** -0.5)


def _numbers(settings: fields.Settings, name: str, n: int) -> list[float]:
    """A list of n factors; if it is missing, all are 1."""
    found = settings.get(name)
    if found is None:
        return [1.0] * n
    if not isinstance(found, list) or len(found) != n:
        raise InputError(f"{name} must be {n} numbers, got {found!r:.80}")
    return [number({name: value}, name, 1.0) for value in found]


def _write_factors(model: Written) -> dict[str, Any]:
    attention, factors = model.first("attention"), model.first("mamba2")["multipliers"]
    feed_forward, usual = model.first("feed_forward"), _usual(attention["d_head"])
    return {
        "attention_out_multiplier": float(attention["out_scale"]),
        "key_multiplier": (attention["score_scale"] or usual) / usual,
        "lm_head_multiplier": 1 / model.config.logits_divisor,
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [float(feed_forward[name]) for name in ("gate_scale", "out_scale")],
        "ssm_multipliers": [float(getattr(factors, name)) for name in _SSM],
        "ssm_out_multiplier": float(factors.out),
    }


def _every(settings: fields.Settings, name: str, period: int, offset: int) -> tuple[int, int]:
    """The distance between layers of a kind, and the index of the first."""
    period = count(settings, f"{name}_period", period)
    first = settings.get(f"{name}_offset", offset)
    if type(first) is not int or not 0 <= first < period:
        raise InputError(f"{name}_offset must be from 0 to {period - 1}, got {first!r:.40}")
    return period, first


def _read_jamba(draft: Draft) -> None:
    settings, depth = draft.settings, range(fields.layer_count(draft.settings))
    experts = count(settings, "num_experts", 16)
    every, first = _every(settings, "expert_layer", 2, 1)
    draft.sparse = [experts > 1 and i % every == first for i in depth]
    every, first = _every(settings, "attn_layer", 8, 4)
    draft.mixers = ["attention" if i % every == first else "mamba" for i in depth]
    draft.put("moe.experts", experts)
    draft.put("mamba.dt_rank", dt_rank(settings, "mamba_dt_rank"))
    draft.put("mamba.expand", float(count(settings, "mamba_expand", 2)))


def _write_jamba(model: Written) -> dict[str, Any]:
    mamba, sparse = model.first("mamba"), model.numbers("moe")

    def every(name: str, found: Sequence[int]) -> dict[str, int]:
        period = found[1] - found[0] if len(found) > 1 else len(model.blocks)
        return {f"{name}_period": period, f"{name}_offset": found[0]}

    return {
        "mamba_expand": int(mamba["expand"]),
        "mamba_dt_rank": mamba["dt_rank"],
        **every("attn_layer", model.numbers("attention")),
        **every("expert_layer", sparse or [0]),
        "num_experts": model.first("moe")["experts"] if sparse else 1,
    }


_LISTS = "layer_types layers_block_type hybrid_override_pattern"
_KINDS = {**_WORDS, "mlp": "feed_forward", "moe": "moe"}
_OLD_KINDS = {"mamba": "mamba2", "attention": "attention"}
_SIGNS = {"M": "mamba2", "*": "attention", "-": "feed_forward", "E": "moe"}


def _read_nemotron(draft: Draft) -> None:
    settings = draft.settings
    inner = count(settings, "mamba_num_heads", 128) * draft.layers["mamba2"]["d_head"]
    draft.put("mamba2.expand", inner / draft.model["d_model"])
    draft.put("mamba2.min_step", number(settings, "time_step_min", 1e-3))
    fields.agree(settings, attention_head_dim=settings["head_dim"])  # transformers reads head_dim
    # a list of words, or a text with a sign for each layer
    stated = next((settings[name] for name in _LISTS.split() if settings.get(name)), None)
    known = _SIGNS if isinstance(stated, str) else _KINDS | _OLD_KINDS
    if not isinstance(stated, str | list) or len(stated) > MAX_LAYERS:
        raise InputError(
            f"layers_block_type must list 1 to {MAX_LAYERS} layers, got {stated!r:.80}"
        )
    if unknown := [str(word) for word in stated if str(word) not in known]:
        raise InputError(f"layers of a Nemotron-H are {', '.join(known)}, got {unknown[0]!r}")
    draft.mixers = [known[word] for word in stated]
    if draft.layers["feed_forward"]["bias"] and "moe" in draft.mixers:
        raise InputError("mlp_bias=True is not supported in a model with experts")


def _write_nemotron(model: Written) -> dict[str, Any]:
    mamba2, words = model.first("mamba2"), {ours: word for word, ours in _KINDS.items()}
    return {
        "time_step_min": float(mamba2["min_step"]),
        "mamba_num_heads": inner_width(mamba2, model.config) // mamba2["d_head"],
        "layers_block_type": [words[layer.name] for (layer,) in model.blocks],
    }


def _lfm2(*rules: Rule, inert: str, **fixed: Any) -> Fields:
    """Fields of an LFM2 with rules of its own."""

    def tied(draft: Draft) -> None:
        name = "tie_embedding" if "tie_embedding" in draft.settings else "tie_word_embeddings"
        draft.put("tie_embeddings", flag(draft.settings, name, True))

    def derived(draft: Draft) -> list[str]:
        depth = range(fields.layer_count(draft.settings))
        full = fields.layer_indices(draft.settings, "full_attn_idxs")
        return ["full_attention" if full is None or i in full else "conv" for i in depth]

    return Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            Rule(
                "tie_embedding tie_word_embeddings",
                tied,
                lambda model: {"tie_word_embeddings": model.config.tie_embeddings},
            ),
            *(field("norm_eps", place, 1e-5) for place in ("norm_eps", "attention.qk_norm.eps")),
            *fields.several("gated_conv", "conv_L_cache=taps:3 conv_bias=bias:False"),
            *rules,
            fields.heads(8),
            fields.rope(1e6),
            fields.kinds({"full_attention": "attention", "conv": "gated_conv"}, derived),
        ),
        inert=inert,
        fixed={"attention.qk_norm": "rms", **fixed},
    )


def _read_hidden(draft: Draft) -> None:
    """The actual hidden width, which the official code computes from the one in the settings."""
    settings = draft.settings
    name = "block_ff_dim" if "block_ff_dim" in settings else "intermediate_size"
    hidden = count(settings, name)
    if settings.get("block_auto_adjust_ff_dim", True):
        hidden = int(2 * hidden / 3)
        if settings.get("block_ffn_dim_multiplier", 1.0) is not None:
            factor = number(settings, "block_ffn_dim_multiplier", 1.0)
            if not 0 < factor < 1e6:
                raise InputError(f"block_ffn_dim_multiplier must be positive, got {factor}")
            multiple = count(settings, "block_multiple_of", 256)
            hidden = -(-int(factor * hidden) // multiple) * multiple
    draft.put("feed_forward.d_hidden", hidden)


def _write_hidden(model: Written) -> dict[str, Any]:
    hidden = model.first("feed_forward")["d_hidden"]
    return {"intermediate_size": hidden, "block_auto_adjust_ff_dim": False}


def _read_dense(draft: Draft) -> None:
    dense = count(draft.settings, "num_dense_layers", 2, least=0)
    draft.sparse = [i >= dense for i in range(fields.layer_count(draft.settings))]


_MAMBA_INERT = f"mamba_chunk_size {LOSS} use_mamba_kernels z_loss_coefficient"
_FIELDS = {
    "bamba": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-5, "mamba2"),
            fields.heads(8),
            *_mamba2(),
            Rule(f"attn_layer_indices attn_rotary_emb {fields.PARTIAL}", _read_bamba, _write_bamba),
        ),
        {**fields.SILU, **_PLAIN},
        _MAMBA_INERT,
    ),
    "granitemoehybrid": Fields(
        (
            *fields.ENDS,
            *fields.norms(1e-6, "mamba2"),
            fields.heads(),
            *_mamba2(),
            Rule(
                f"num_local_experts position_embedding_type {fields.ROPE}",
                _read_granite,
                _write_granite,
            ),
            field("shared_intermediate_size", "feed_forward.d_hidden", 1024),
            shared_expert(1024, "shared_intermediate_size", gate=False),
            *fields.several("moe", "intermediate_size=d_hidden:11008 num_experts_per_tok=top_k:2"),
            *MULTIPLIERS,
            fields.kinds(
                {**_WORDS, **fields.FULL, "mamba": "mamba2"},
                lambda draft: ["mamba"] * fields.layer_count(draft.settings),
                names="layers_block_type layer_types",  # transformers prefers the first
            ),
        ),
        {**fields.SILU, **_PLAIN},
        f"{_MAMBA_INERT} normalization_function",
    ),
    "falcon_h1": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-5, "mamba2"),
            fields.heads(8),
            fields.rope(),
            *_mamba2("mamba_d_ssm", 1024),
            field("mamba_rms_norm", "mamba2.normalise", False),
            field("embedding_multiplier", "embedding_multiplier", 1.0),
            Rule(
                "attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers "
                "lm_head_multiplier mamba_norm_before_gate ssm_in_multiplier ssm_multipliers "
                "ssm_out_multiplier",
                _read_factors,
                _write_factors,
            ),
        ),
        {**fields.SILU, **_PLAIN, "projectors_bias": (False,)},
        "mamba_chunk_size mamba_use_mlp",
    ),
    "jamba": Fields(
        (
            *fields.GATED,
            *fields.norms(1e-6, "mamba"),
            Rule(
                "attn_layer_period attn_layer_offset num_experts expert_layer_period "
                "expert_layer_offset mamba_dt_rank mamba_expand",
                _read_jamba,
                _write_jamba,
            ),
            field("intermediate_size", "moe.d_hidden"),
            field("num_experts_per_tok", "moe.top_k", 2),
            *fields.several(
                "mamba",
                "mamba_d_state=d_state:16 mamba_d_conv=d_conv:4 mamba_conv_bias=conv_bias:True "
                "mamba_proj_bias=bias:False",
            ),
            fields.heads(8),
        ),
        fields.SILU,
        f"max_position_embeddings {LOSS} use_associative_scan use_mamba_kernels use_mambapy",
        {"mamba.learned_norms": True, "moe.normalise": False},
    ),
    "nemotron_h": Fields(
        (
            *fields.UNTIED,
            fields.hidden(21504),
            *(field("layer_norm_epsilon", f"{p}norm_eps", 1e-5) for p in ("", "mamba2.")),
            *fields.several(
                "mamba2",
                "ssm_state_size=d_state:128 mamba_head_dim=d_head:64 n_groups:8 "
                "conv_kernel=d_conv:4 use_bias=bias:False use_conv_bias=conv_bias:True",
            ),
            field("mlp_bias", "feed_forward.bias", False),
            *fields.several(
                "moe",
                "n_routed_experts=experts:8 num_experts_per_tok=top_k:2 "
                "norm_topk_prob=normalise:True moe_intermediate_size=d_hidden:7688 "
                "routed_scaling_factor=scale:1.0",
            ),
            shared_expert(7688, "moe_shared_expert_intermediate_size", gate=False),
            fields.heads(8, 128),
            Rule(
                f"attention_head_dim mamba_num_heads time_step_min {_LISTS}",
                _read_nemotron,
                _write_nemotron,
            ),
        ),
        {
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "n_group": (1,),
            "topk_group": (1,),
            "moe_latent_size": (None,),
        },
        # what transformers does not read
        "attention_bias chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype "
        "max_position_embeddings moe_shared_expert_overlap mtp_hybrid_override_pattern "
        "mtp_layers_block_type n_shared_experts norm_eps num_hidden_layers "
        "num_nextn_predict_layers output_router_logits partial_rotary_factor "
        "rescale_prenorm_residual residual_in_fp32 rms_norm_eps rope_theta "
        "sliding_window time_step_floor time_step_limit time_step_max "
        "time_step_rank use_mamba_kernels",
        {
            "feed_forward": "none",
            "feed_forward.activation": "relu2",
            "moe.activation": "relu2",
            "moe.scores": "sigmoid",
            "moe.correction": True,
        },
        depth="",
    ),
    "lfm2": _lfm2(
        Rule(
            "block_auto_adjust_ff_dim block_ff_dim intermediate_size block_ffn_dim_multiplier "
            "block_multiple_of full_attn_idxs",
            _read_hidden,
            _write_hidden,
        ),
        # fields of older versions, whose values new names repeat
        inert="block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads theta "
        "use_pos_enc",
    ),
    "lfm2_moe": _lfm2(
        fields.hidden(7168),
        Rule(
            "num_dense_layers",
            _read_dense,
            lambda model: {"num_dense_layers": len(model.blocks) - len(model.numbers("moe"))},
        ),
        *fields.several(
            "moe",
            "num_experts=experts:32 num_experts_per_tok=top_k:4 use_expert_bias=correction:True "
            "moe_intermediate_size=d_hidden:1792 norm_topk_prob=normalise:True "
            "routed_scaling_factor=scale:1.0",
        ),
        inert="output_router_logits",
        **{"moe.scores": "sigmoid", "moe.normalise_eps": 1e-6},
    ),
}

CONVERTERS = {
    "bamba": family(_BAMBA, _FIELDS["bamba"], bamba="BambaForCausalLM"),
    "granitemoehybrid": family(
        _GRANITE, _FIELDS["granitemoehybrid"], granitemoehybrid="GraniteMoeHybridForCausalLM"
    ),
    "falcon_h1": family(
        _BAMBA._replace(mixers=("parallel",), branches=_BAMBA.mixers),
        _FIELDS["falcon_h1"],
        falcon_h1="FalconH1ForCausalLM",
    ),
    "jamba": family(_JAMBA, _FIELDS["jamba"], jamba="JambaForCausalLM"),
    "nemotron_h": family(_NEMOTRON, _FIELDS["nemotron_h"], nemotron_h="NemotronHForCausalLM"),
    "lfm2": family(_LFM2, _FIELDS["lfm2"], lfm2="Lfm2ForCausalLM"),
    "lfm2_moe": family(_LFM2_MOE, _FIELDS["lfm2_moe"], lfm2_moe="Lfm2MoeForCausalLM"),
}
"""By ``model_type``."""
