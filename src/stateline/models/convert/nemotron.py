"""Nemotron-H without experts: Mamba-2, attention and feed-forwards, each in a branch of its own."""

from typing import Any

from stateline.errors import InputError
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.parts import Names, first_keywords, groups, inner_width
from stateline.models.convert.weights import count, number

NAMES = Names(
    embedding="backbone.embeddings",
    mixers=("mamba2", "attention", "feed_forward"),
    base="backbone.",
    norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    norms=("norm",),
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    inner="mixer.",
)
_WORDS = {"linear_attention": "mamba2", "full_attention": "attention", "mlp": "feed_forward"}
_OLD_WORDS = {"mamba": "mamba2", "attention": "attention"}
_SIGNS = {"M": "mamba2", "*": "attention", "-": "feed_forward"}


_NAMES = "layer_types layers_block_type hybrid_override_pattern"
_EPS = fields.Field("layer_norm_epsilon", "norm_eps", 1e-5)
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        fields.HIDDEN,
        _EPS,
        fields.Field("ssm_state_size", "mamba2.d_state", 128),
        fields.Field("mamba_head_dim", "mamba2.d_head", 64),
        fields.Field("n_groups", "mamba2.n_groups", 8),
        fields.Field("conv_kernel", "mamba2.d_conv", 4),
        fields.Field("use_bias", "mamba2.bias", False),
        fields.Field("use_conv_bias", "mamba2.conv_bias", True),
        _EPS._replace(ours="mamba2.norm_eps"),
        fields.Field("mlp_bias", "feed_forward.bias", False),
    ),
    f"{fields.HEADS} attention_head_dim mamba_num_heads time_step_min {_NAMES}",
    {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
    # what transformers does not read in models without experts
    "attention_bias chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype "
    "max_position_embeddings moe_intermediate_size moe_latent_size "
    "moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern "
    "mtp_layers_block_type n_group n_routed_experts n_shared_experts norm_topk_prob "
    "num_experts_per_tok num_hidden_layers num_nextn_predict_layers output_router_logits "
    "rescale_prenorm_residual residual_in_fp32 rms_norm_eps rope_theta routed_scaling_factor "
    "sliding_window tie_word_embeddings time_step_floor time_step_limit time_step_max "
    "time_step_rank topk_group use_mamba_kernels",
    depth="",
)


def nemotron_h_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Nemotron-H without experts."""
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
    return ModelConfig(
        fields.runs(_layers(settings)),
        norm="rms",
        feed_forward="none",
        tie_embeddings=False,  # transformers ignores tie_word_embeddings in this family
        layers=layers,
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
        raise InputError(
            f"layers of a Nemotron-H without experts are {', '.join(known)}, got {unknown[0]!r}"
        )
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
        "Nemotron-H without experts of Hugging Face transformers",
        NAMES,
        nemotron_h_config,
        nemotron_h_settings,
        {"nemotron_h": "NemotronHForCausalLM"},
    )
}
"""By ``model_type``."""
