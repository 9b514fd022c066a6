"""Nemotron-H: Mamba-2, attention, feed-forwards and experts, each in a branch of its own."""

from typing import Any

from stateline.errors import InputError
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.parts import Experts, Names, first_keywords, groups, inner_width
from stateline.models.convert.weights import count, number

NAMES = Names(
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
_WORDS = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mlp": "feed_forward",
    "moe": "moe",
}
_OLD_WORDS = {"mamba": "mamba2", "attention": "attention"}
_SIGNS = {"M": "mamba2", "*": "attention", "-": "feed_forward", "E": "moe"}


_NAMES = "layer_types layers_block_type hybrid_override_pattern"
_EPS = fields.Field("layer_norm_epsilon", "norm_eps", 1e-5)
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        fields.HIDDEN._replace(default=21504),
        _EPS,
        fields.Field("ssm_state_size", "mamba2.d_state", 128),
        fields.Field("mamba_head_dim", "mamba2.d_head", 64),
        fields.Field("n_groups", "mamba2.n_groups", 8),
        fields.Field("conv_kernel", "mamba2.d_conv", 4),
        fields.Field("use_bias", "mamba2.bias", False),
        fields.Field("use_conv_bias", "mamba2.conv_bias", True),
        _EPS._replace(ours="mamba2.norm_eps"),
        fields.Field("mlp_bias", "feed_forward.bias", False),
        fields.Field("n_routed_experts", "moe.experts", 8),
        fields.Field("num_experts_per_tok", "moe.top_k", 2),
        fields.Field("moe_intermediate_size", "moe.d_hidden", 7688),
        fields.Field("moe_shared_expert_intermediate_size", "moe.d_shared", 7688),
        fields.Field("norm_topk_prob", "moe.normalise", True),
        fields.Field("routed_scaling_factor", "moe.scale", 1.0),
    ),
    f"{fields.HEADS} attention_head_dim mamba_num_heads time_step_min {_NAMES}",
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
    "sliding_window tie_word_embeddings time_step_floor time_step_limit time_step_max "
    "time_step_rank use_mamba_kernels",
    depth="",
)


def nemotron_h_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Nemotron-H."""
    model, layers = FIELDS.read(settings)
    inner = count(settings, "mamba_num_heads", 128) * count(settings, "mamba_head_dim", 64)
    layers["attention"] = fields.heads({"head_dim": 128, **settings}, 8)
    if settings.get("attention_head_dim", wanted := settings.get("head_dim", 128)) != wanted:
        raise InputError(
            f"attention_head_dim={settings['attention_head_dim']!r:.20} is not read by "
            f"transformers, which takes head_dim, {wanted!r:.20}"
        )
    layers["mamba2"]["expand"] = inner / model["d_model"]
    layers["mamba2"]["min_step"] = number(settings, "time_step_min", 1e-3)
    layers["feed_forward"]["activation"] = "relu2"
    layers["moe"] |= {"activation": "relu2", "scores": "sigmoid", "correction": True}
    found = _layers(settings)
    if layers["feed_forward"]["bias"] and "moe" in found:
        raise InputError("mlp_bias=True is not supported in a model with experts")
    return ModelConfig(
        fields.runs(found),
        norm="rms",
        feed_forward="none",
        tie_embeddings=False,  # transformers ignores tie_word_embeddings in this family
        layers={name: keywords for name, keywords in layers.items() if name in found},
        **model,
    )


def _layers(settings: Settings) -> list[str]:
    """Our name of each layer, of a list of words or of a text with a sign for each."""
    stated = next((settings[name] for name in _NAMES.split() if settings.get(name)), None)
    known = _SIGNS if isinstance(stated, str) else _WORDS | _OLD_WORDS
    if not isinstance(stated, str | list) or not 0 < len(stated) <= MAX_LAYERS:
        raise InputError(
            f"layers_block_type must list 1 to {MAX_LAYERS} layers, got {stated!r:.80}"
        )
    if unknown := [str(word) for word in stated if str(word) not in known]:
        raise InputError(f"layers of a Nemotron-H are {', '.join(known)}, got {unknown[0]!r}")
    return [known[word] for word in stated]


def nemotron_h_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`nemotron_h_config`."""
    blocks = groups(config, NAMES)
    mamba2 = first_keywords(blocks, "mamba2")
    words = {ours: official for official, ours in _WORDS.items()}
    return {
        **FIELDS.write(config, blocks),
        "tie_word_embeddings": False,
        "time_step_min": mamba2["min_step"],
        "mamba_num_heads": inner_width(mamba2, config) // mamba2["d_head"],
        "layers_block_type": [words[layer.name] for (layer,) in blocks],
    }


CONVERTERS = {
    "nemotron_h": Converter(
        "Nemotron-H of Hugging Face transformers",
        NAMES,
        nemotron_h_config,
        nemotron_h_settings,
        {"nemotron_h": "NemotronHForCausalLM"},
    )
}
"""By ``model_type``."""
