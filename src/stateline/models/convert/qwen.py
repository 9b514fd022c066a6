"""Qwen3-Next and Qwen3.5 without experts: gated delta nets and gated attention."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Settings, family
from stateline.models.convert.decoders import BIAS, GATED, NORM, SILU
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.parts import first_keywords, groups
from stateline.models.convert.weights import count, section

_DELTA = DECODER._replace(mixers=("gated_delta_net", "attention"), inner="linear_attn.")
NAMES = {
    "qwen3_next": _DELTA._replace(delta=("in_proj_qkvz", "in_proj_ba")),
    "qwen3_5_text": _DELTA._replace(delta=("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")),
}
NAMES["qwen3_5_text"] = NAMES["qwen3_5_text"]._replace(
    # of files that also read images
    spell=lambda found: {n: n.replace("model.language_model.", "model.", 1) for n in found}
)
_TOP = fields.Fields(
    (),
    "text_config tie_word_embeddings",
    inert="image_token_id language_model_only video_token_id vision_config vision_end_token_id "
    "vision_start_token_id",
    depth="",
)
"""Fields of a model that also reads images, outside its part for text."""
_KV_HEADS = {"qwen3_next": 2, "qwen3_5_text": 4}
FIELDS = fields.Fields(
    (
        *GATED,
        BIAS,
        NORM,
        NORM._replace(ours="attention.norm_eps"),
        NORM._replace(ours="gated_delta_net.norm_eps"),
        fields.Field("linear_num_value_heads", "gated_delta_net.n_heads", 32),
        fields.Field("linear_num_key_heads", "gated_delta_net.n_key_heads", 16),
        fields.Field("linear_key_head_dim", "gated_delta_net.d_key", 128),
        fields.Field("linear_conv_kernel_dim", "gated_delta_net.d_conv", 4),
    ),
    f"{fields.HEADS} {fields.PARTIAL_ROPE} layer_types full_attention_interval "
    "linear_value_head_dim num_experts mlp_only_layers decoder_sparse_step",
    {**SILU, "attn_output_gate": (True,), "output_gate_type": ("swish",)},
    # of experts, which a dense model does not have, of more heads for training, and precisions
    "mamba_ssm_dtype moe_intermediate_size mtp_num_hidden_layers mtp_use_dedicated_embeddings "
    "norm_topk_prob num_experts_per_tok output_router_logits router_aux_loss_coef "
    "shared_expert_intermediate_size",
)


def qwen_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a Qwen3-Next or Qwen3.5 without experts."""
    if settings.get("text_config"):
        settings = _text(settings)
    model, layers = FIELDS.read(settings)
    n_layers = fields.layer_count(settings)
    if kind == "qwen3_next":
        _check_dense(settings, n_layers)
    settings = {"head_dim": 256, **settings}
    every = count(settings, "full_attention_interval", 4)
    derived = ["linear_attention" if n % every else "attention" for n in range(1, n_layers + 1)]
    types = (
        fields.layer_types(settings, "layer_types", known=(*fields.FULL, "linear_attention"))
        or derived
    )
    layers["attention"] |= {
        **fields.heads(settings, _KV_HEADS[kind]),
        **fields.rope(settings, fraction=0.25),
        "qk_norm": "offset",
        "gated": True,
    }
    delta = layers["gated_delta_net"]
    values = count(settings, "linear_value_head_dim", 128)
    delta["expand_v"] = values / count(settings, "linear_key_head_dim", 128)
    return ModelConfig(
        fields.runs(["attention" if name in fields.FULL else "gated_delta_net" for name in types]),
        norm="rms_offset",
        feed_forward="swiglu",
        layers=layers,
        **model,
    )


def _text(settings: Settings) -> Settings:
    """The fields of the part for text."""
    _TOP.read(settings)
    text = section(settings, "text_config")
    tied = settings.get("tie_word_embeddings", wanted := text.get("tie_word_embeddings", False))
    if tied != wanted:
        raise InputError(
            f"tie_word_embeddings must be the same in text_config, got {tied} and {wanted}"
        )
    return text


def _check_dense(settings: Settings, n_layers: int) -> None:
    """Raise InputError if a layer has experts."""
    experts, dense = (
        settings.get("num_experts", 512),
        fields.layer_indices(settings, "mlp_only_layers"),
    )
    step = count(settings, "decoder_sparse_step", 1)
    if experts and set(range(step - 1, n_layers, step)) - set(dense or []):
        raise InputError(
            f"mixtures of experts are not supported, got a qwen3_next with num_experts={experts}"
        )


def qwen_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`qwen_config`."""
    blocks = groups(config, NAMES[kind])
    delta = first_keywords(blocks, "gated_delta_net")
    words = {"attention": "full_attention", "gated_delta_net": "linear_attention"}
    return {
        **FIELDS.write(config, blocks),
        "linear_value_head_dim": round(delta["expand_v"] * delta["d_key"]),
        "layer_types": [words[mixer.name] for mixer, _ in blocks],
        **({"num_experts": 0} if kind == "qwen3_next" else {}),
    }


_FUNCTIONS = qwen_config, qwen_settings
CONVERTERS = {
    "qwen3_next": family(
        "qwen3_next",
        "Qwen3-Next without experts",
        NAMES["qwen3_next"],
        _FUNCTIONS,
        "Qwen3NextForCausalLM",
    ),
    "qwen3_5_text": family(
        "qwen3_5_text",
        "Qwen3.5 without experts",
        NAMES["qwen3_5_text"],
        _FUNCTIONS,
        "Qwen3_5ForCausalLM",
        qwen3_5="Qwen3_5ForConditionalGeneration",
    ),
}
"""By ``model_type``."""
