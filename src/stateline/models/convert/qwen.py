"""Qwen3-Next and Qwen3.5: gated delta nets and gated attention."""

from collections.abc import Sequence
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Settings, family
from stateline.models.convert.decoders import BIAS, GATED, NORM, SILU
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.parts import Experts, Layer, first_keywords, groups
from stateline.models.convert.weights import count, section

EXPERTS = Experts(
    "mlp.gate",
    ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.{}.down_proj",
    (("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"),
    "mlp.shared_expert_gate",
    whole=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
_DELTA = DECODER._replace(mixers=("gated_delta_net", "attention"), inner="linear_attn.")
NAMES = {
    "qwen3_next": _DELTA._replace(delta=("in_proj_qkvz", "in_proj_ba"), experts=EXPERTS),
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
NAMES["qwen3_5_moe_text"] = NAMES["qwen3_5_text"]._replace(experts=EXPERTS)
_KV_HEADS = {"qwen3_next": 2, "qwen3_5_text": 4, "qwen3_5_moe_text": 2}
SPARSE = "num_experts mlp_only_layers decoder_sparse_step"
"""Fields that say which layers have experts."""

_DENSE = fields.Fields(
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
    "linear_value_head_dim",
    {
        **SILU,
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
        "use_sliding_window": (False,),
    },
    # of more heads for training, and precisions
    "mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings",
)


def expert_fields(top_k: int, width: int, *, normalise: bool) -> tuple[fields.Field, ...]:
    """Fields of experts, with their defaults."""
    return (
        fields.Field("num_experts_per_tok", "moe.top_k", top_k),
        fields.Field("moe_intermediate_size", "moe.d_hidden", width),
        fields.Field("norm_topk_prob", "moe.normalise", normalise),
    )


SHARED = fields.Field("shared_expert_intermediate_size", "moe.d_shared", 512)
LOSS = "output_router_logits router_aux_loss_coef"
"""Fields of the loss that balances experts."""

FIELDS = {
    "qwen3_5_text": _DENSE._replace(
        # of a model with experts, which this one does not have
        inert=f"{_DENSE.inert} {LOSS} {SPARSE} moe_intermediate_size norm_topk_prob "
        "num_experts_per_tok shared_expert_intermediate_size"
    ),
    "qwen3_next": _DENSE._replace(
        ours=(
            *(field for field in _DENSE.ours if field is not fields.HIDDEN),
            fields.HIDDEN._replace(default=5632),
            *expert_fields(10, 512, normalise=True),
            SHARED,
        ),
        reads=f"{_DENSE.reads} {SPARSE}",
        inert=f"{_DENSE.inert} {LOSS}",
    ),
    "qwen3_5_moe_text": _DENSE._replace(
        ours=(
            *(field for field in _DENSE.ours if field is not fields.HIDDEN),
            fields.Field("num_experts", "moe.experts", 256),
            *expert_fields(8, 512, normalise=True)[:2],
            SHARED,
        ),
        # the weights of experts are always normalised
        inert=f"{_DENSE.inert} {LOSS} {SPARSE.removeprefix('num_experts ')} intermediate_size "
        "norm_topk_prob",
    ),
}
"""By ``model_type``."""


def qwen_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a Qwen3-Next or Qwen3.5."""
    if settings.get("text_config"):
        settings = _text(settings)
    model, layers = FIELDS[kind].read(settings)
    n_layers = fields.layer_count(settings)
    sparse = [False] * n_layers
    if kind == "qwen3_next":
        sparse = sparse_layers(settings, layers, 512)
    if kind == "qwen3_5_moe_text":
        sparse = [True] * n_layers
    if "moe" in layers:
        layers["moe"]["gate_shared"] = True
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
    mixers = ["attention" if name in fields.FULL else "gated_delta_net" for name in types]
    return ModelConfig(**fields.composed(mixers, sparse, layers), norm="rms_offset", **model)


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


def sparse_layers(
    settings: Settings, layers: dict[str, dict[str, Any]], default: int
) -> list[bool]:
    """Whether each layer is a mixture of experts; their number is added to the keywords.

    Args:
        settings: As in ``config.json``.
        layers: Keywords by kind of layer.
        default: Number of experts if it is missing.
    """
    n_layers, step = fields.layer_count(settings), count(settings, "decoder_sparse_step", 1)
    dense = fields.layer_indices(settings, "mlp_only_layers") or []
    if settings.get("num_experts", default) == 0:
        return [False] * n_layers
    layers["moe"]["experts"] = count(settings, "num_experts", default)
    return [(i + 1) % step == 0 and i not in dense for i in range(n_layers)]


def sparse_layers_back(blocks: Sequence[tuple[Layer, ...]]) -> dict[str, Any]:
    """The inverse of :func:`sparse_layers`."""
    experts = [layer.keywords["experts"] for _, layer in blocks if layer.name == "moe"]
    dense = [i for i, (_, layer) in enumerate(blocks) if layer.name != "moe"]
    return {"num_experts": experts[0] if experts else 0, "mlp_only_layers": dense}


def qwen_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`qwen_config`."""
    blocks = groups(config, NAMES[kind])
    delta = first_keywords(blocks, "gated_delta_net")
    words = {"attention": "full_attention", "gated_delta_net": "linear_attention"}
    return {
        **FIELDS[kind].write(config, blocks),
        "linear_value_head_dim": round(delta["expand_v"] * delta["d_key"]),
        "layer_types": [words[mixer.name] for mixer, _ in blocks],
        **(sparse_layers_back(blocks) if kind == "qwen3_next" else {}),
    }


_FUNCTIONS = qwen_config, qwen_settings
CONVERTERS = {
    "qwen3_next": family(
        "qwen3_next",
        "Qwen3-Next",
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
    "qwen3_5_moe_text": family(
        "qwen3_5_moe_text",
        "Qwen3.5 with experts",
        NAMES["qwen3_5_moe_text"],
        _FUNCTIONS,
        "Qwen3_5MoeForCausalLM",
        qwen3_5_moe="Qwen3_5MoeForConditionalGeneration",
    ),
}
"""By ``model_type``."""
