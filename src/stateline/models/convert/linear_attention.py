"""Linear attention: Kimi-Linear, MiniMax-01 and xLSTM."""

from dataclasses import replace
from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.heads import Rope
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoders import LOSS, MIXTRAL, NAMES, all_sparse
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.parts import Names, Written
from stateline.models.convert.weights import count, number, section
from stateline.pattern import parse_value

_MLP = "block_sparse_moe."
_KIMI = NAMES._replace(
    mixers=("kimi_delta_attention", "latent_attention"),
    inner="self_attn.",
    up=(f"{_MLP}gate_proj", f"{_MLP}up_proj"),
    down=f"{_MLP}down_proj",
    experts=MIXTRAL._replace(
        always=(
            (f"{_MLP}shared_experts.gate_proj", f"{_MLP}shared_experts.up_proj"),
            f"{_MLP}shared_experts.down_proj",
        ),
        correction=f"{_MLP}gate.e_score_correction_bias",
    ),
    # published files have another name for the feed-forwards of dense layers
    spell=lambda found: {name: name.replace(".mlp.", f".{_MLP}") for name in found},
)
_DELTA = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYERS = ("full_attn_layers", "kda_layers")


def _read_nested(draft: Draft) -> None:
    """Move the fields of ``linear_attn_config`` to the top level."""
    delta = section(draft.settings, "linear_attn_config")
    if unknown := sorted(delta.keys() - {*_DELTA, *_LAYERS}):
        raise InputError(f"linear_attn_config with {unknown[0]} is not supported")
    draft.settings = {**draft.settings, **{_DELTA[n]: delta[n] for n in _DELTA if n in delta}}


def _kimi_kinds(draft: Draft) -> list[str]:
    # lists in that field count layers from 1
    delta, n = section(draft.settings, "linear_attn_config"), fields.layer_count(draft.settings)
    full, linear = (fields.layer_indices(delta, name) for name in _LAYERS)
    if full is None or linear is None:
        full = [i for i in range(2, n + 1) if i % 4 == 1]
    elif sorted([*full, *linear]) != list(range(1, n + 1)):
        raise InputError(f"{' and '.join(_LAYERS)} must name each of {n} layers once")
    return ["full_attention" if i in full else "linear_attention" for i in range(1, n + 1)]


def _read_latent(draft: Draft) -> None:
    latent = draft.layers["latent_attention"]
    given = {"v_head_dim": 128, "num_key_value_heads": 32, **draft.settings}
    fields.agree(given, v_head_dim=latent["d_head"], num_key_value_heads=latent["n_heads"])


def _write_latent(model: Written) -> dict[str, Any]:
    latent = model.first("latent_attention")
    return {
        "pad_token_id": None,  # the default is the number of a token of the published models
        "num_key_value_heads": latent["n_heads"],
        "v_head_dim": latent["d_head"],
    }


def _read_dense(draft: Draft) -> None:
    settings, n = draft.settings, fields.layer_count(draft.settings)
    types = fields.layer_types(settings, "mlp_layer_types", ("dense", "sparse"))
    if types is None:
        first = count(settings, "first_k_dense_replace", 1, least=0)
        types = ["sparse" if i >= first else "dense" for i in range(n)]
    draft.sparse = [word == "sparse" for word in types]


def _write_dense(model: Written) -> dict[str, Any]:
    words = ["sparse" if end.name == "moe" else "dense" for _, end in model.blocks]
    return {"mlp_layer_types": words}


_KIMI_FIELDS = Fields(
    (
        Rule("linear_attn_config", _read_nested),
        *fields.UNTIED,
        fields.hidden(9216),
        *fields.norms(1e-5, "kimi_delta_attention"),
        *fields.several(
            "kimi_delta_attention",
            "linear_num_heads=n_heads:32 linear_head_dim=d_head:128 "
            "linear_conv_kernel_dim=d_conv:4",
        ),
        *fields.several(
            "latent_attention",
            "num_attention_heads=n_heads:32 qk_nope_head_dim=d_head:128 "
            "qk_rope_head_dim=d_rotary:64 kv_lora_rank=d_latent:512",
        ),
        *fields.several(
            "moe",
            "num_experts=experts:256 num_experts_per_token=top_k:8 num_shared_experts=shared:1 "
            "moe_intermediate_size=d_hidden:1024 moe_renormalize=normalise:True "
            "routed_scaling_factor=scale:2.446",
        ),
        Rule("num_key_value_heads v_head_dim", _read_latent, _write_latent),
        Rule("mlp_layer_types first_k_dense_replace", _read_dense, _write_dense),
        fields.kinds(
            {"linear_attention": "kimi_delta_attention", "full_attention": "latent_attention"},
            _kimi_kinds,
        ),
    ),
    {
        **fields.SILU,
        "attention_bias": (False,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
        "num_expert_group": (1,),
        "q_lora_rank": (None,),
        "topk_group": (1,),
    },
    # nothing is rotated
    f"{fields.ROPE} head_dim num_nextn_predict_layers output_router_logits qk_head_dim "
    "use_grouped_topk",
    {"latent_attention.position": "none", "moe.scores": "sigmoid", "moe.correction": True},
)

_PLACES = ("full_attn", "linear_attn", "mlp")
_FACTORS = {"stream_multiplier": "alpha", "residual_multiplier": "beta"}


def _read_minimax(draft: Draft) -> None:
    settings, n = draft.settings, fields.layer_count(draft.settings)
    for ours, word in _FACTORS.items():
        found = {number(settings, f"{place}_{word}_factor", 1.0) for place in _PLACES}
        if len(found) > 1:
            raise InputError(f"the fields *_{word}_factor must be equal, got {sorted(found)}")
        draft.put(ours, found.pop())
    if settings.get("rotary_dim") not in (None, width := fields.head_width(settings)):
        rotated = count(settings, "rotary_dim")
        if rotated % 2 or rotated > width:
            raise InputError(f"rotary_dim must be even and at most {width}, got {rotated}")
        # Differs from transformers, which rotates whole heads, and not as the model was trained.
        given: dict[str, Any] = parse_value(str(draft.layers["attention"]["position"])).keywords
        draft.put("attention.position", str(Rope(**given | {"fraction": rotated / width})))
    draft.layers["lightning_attention"] = {
        name: value
        for name, value in draft.layers["attention"].items()
        if name in ("n_heads", "d_head")
    }
    # the decay of a head is slower in later layers
    scales = [1 - i / (n - 1 + 1e-5) + 1e-5 for i in range(n)]
    pattern = " ".join(
        f"{mixer}(decay_scale={scale})" if mixer == "lightning_attention" else mixer
        for mixer, scale in zip(draft.mixers, scales, strict=True)
    )
    draft.put("pattern", pattern)


def _write_minimax(model: Written) -> dict[str, Any]:
    attention = model.first("attention")
    position = attention["position"]
    whole = replace(position, fraction=1.0) if isinstance(position, Rope) else position
    factors = {
        f"{place}_{word}_factor": getattr(model.config, ours)
        for ours, word in _FACTORS.items()
        for place in _PLACES
    }
    return {
        **factors,
        **fields.rope_back({"position": whole}),
        "rotary_dim": round(getattr(position, "fraction", 1.0) * attention["d_head"]),
    }


_MINIMAX_FIELDS = Fields(
    (
        *fields.ENDS,
        *fields.norms(1e-5),
        *all_sparse(8, 2, 14336, name="num_local_experts"),
        fields.heads(8),
        fields.rope(1e6),
        fields.kinds(
            {"linear_attention": "lightning_attention", "full_attention": "attention"},
            lambda draft: [
                "linear_attention" if i % 2 else "full_attention"
                for i in range(fields.layer_count(draft.settings))
            ],
        ),
        Rule(
            "rotary_dim "
            + " ".join(f"{place}_{word}_factor" for place in _PLACES for word in _FACTORS.values()),
            _read_minimax,
            _write_minimax,
        ),
    ),
    {
        **fields.SILU,
        "sliding_window": (None,),
        "block_size": (256,),
        "postnorm": (True,),
        "shared_intermediate_size": (0,),
    },
    f"{LOSS} router_jitter_noise shared_moe_mode",
    {"block": "normed"},
)

_XLSTM = Names(
    embedding="backbone.embeddings",
    mixers=("mlstm",),
    base="backbone.",
    norm="backbone.out_norm",
    layer="backbone.blocks.{}.",
    norms=("norm_mlstm", "norm_ffn"),
    up=("ffn.proj_up_gate", "ffn.proj_up"),
    down="ffn.proj_down",
    inner="mlstm_layer.",
)


def _read_defaults(draft: Draft) -> None:
    draft.settings = {"hidden_size": 4096, "num_hidden_layers": 32, **draft.settings}


def _read_xlstm(draft: Draft) -> None:
    settings, width = draft.settings, draft.model["d_model"]
    n = fields.layer_count(settings)
    fields.agree(settings, embedding_dim=width, num_blocks=n)
    draft.mixers = ["mlstm"] * n

    def factor(name: str, default: float) -> float:
        if not 0 < (found := number(settings, name, default)) < 1e6:
            raise InputError(f"{name} must be positive and below a million, got {found}")
        return found

    draft.put("mlstm.expand_k", int(width * factor("qk_dim_factor", 0.5)) / width)
    draft.put("mlstm.expand_v", int(width * factor("v_dim_factor", 1.0)) / width)
    multiple = count(settings, "ffn_round_up_to_multiple_of", 64)
    hidden = width * factor("ffn_proj_factor", 2.667)
    draft.put("feed_forward.d_hidden", int((hidden + multiple - 1) // multiple) * multiple)


def _write_xlstm(model: Written) -> dict[str, Any]:
    mlstm, hidden = model.first("mlstm"), model.first("feed_forward")["d_hidden"]
    return {
        "qk_dim_factor": float(mlstm["expand_k"]),
        "v_dim_factor": float(mlstm["expand_v"]),
        "ffn_proj_factor": hidden / (2 * model.config.d_model),  # which is rounded up
        "ffn_round_up_to_multiple_of": hidden,
    }


_XLSTM_FIELDS = Fields(
    (
        Rule("", _read_defaults),
        *fields.UNTIED,
        *(field("norm_eps", f"{place}norm_eps", 1e-6) for place in ("", "mlstm.")),
        *fields.several(
            "mlstm", "num_heads=n_heads:8 gate_soft_cap=soft_cap:15.0 eps=divisor_eps:1e-6"
        ),
        field("output_logit_soft_cap", "logits_soft_cap", 30.0),
        Rule(
            "embedding_dim ffn_proj_factor ffn_round_up_to_multiple_of num_blocks qk_dim_factor "
            "v_dim_factor",
            _read_xlstm,
            _write_xlstm,
        ),
    ),
    {
        "add_out_norm": (True,),
        "inference_state_dtype": ("float32",),
        "mode": ("inference",),
        "use_bias": (False,),
        "weight_mode": ("single",),
    },
    # which kernels compute it, in which pieces
    "autocast_kernel_dtype chunk_size chunkwise_kernel head_dim max_inference_chunksize "
    "norm_reduction_force_float32 return_last_states sequence_kernel step_kernel",
)

CONVERTERS = {
    "kimi_linear": family(_KIMI, _KIMI_FIELDS, kimi_linear="KimiLinearForCausalLM"),
    "minimax": family(
        NAMES._replace(
            mixers=("lightning_attention", "attention"),
            inner="self_attn.",
            experts=MIXTRAL,
            blocks=("normed",),
        ),
        _MINIMAX_FIELDS,
        minimax="MiniMaxForCausalLM",
    ),
    "xlstm": family(_XLSTM, _XLSTM_FIELDS, xlstm="xLSTMForCausalLM"),
}
"""By ``model_type``."""
