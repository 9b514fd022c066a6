"""Kimi-Linear: Kimi Delta Attention, latent attention without positions, and experts."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.decoders import NORM, SILU
from stateline.models.convert.parts import Experts, first_keywords, groups
from stateline.models.convert.weights import count, section

_MLP = "block_sparse_moe."
NAMES = DECODER._replace(
    mixers=("kimi_delta_attention", "latent_attention"),
    inner="self_attn.",
    up=(f"{_MLP}gate_proj", f"{_MLP}up_proj"),
    down=f"{_MLP}down_proj",
    experts=Experts(
        f"{_MLP}gate",
        (f"{_MLP}experts.{{}}.w1", f"{_MLP}experts.{{}}.w3"),
        f"{_MLP}experts.{{}}.w2",
        (
            (f"{_MLP}shared_experts.gate_proj", f"{_MLP}shared_experts.up_proj"),
            f"{_MLP}shared_experts.down_proj",
        ),
        correction=f"{_MLP}gate.e_score_correction_bias",
    ),
    # published files have another name for the feed-forwards of dense layers
    spell=lambda found: {name: name.replace(".mlp.", f".{_MLP}") for name in found},
)
_WORDS = {"linear_attention": "kimi_delta_attention", "full_attention": "latent_attention"}
_DELTA = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYERS = ("full_attn_layers", "kda_layers")
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        fields.HIDDEN._replace(default=9216),
        NORM._replace(default=1e-5),
        NORM._replace(ours="kimi_delta_attention.norm_eps", default=1e-5),
        fields.Field("linear_num_heads", "kimi_delta_attention.n_heads", 32),
        fields.Field("linear_head_dim", "kimi_delta_attention.d_head", 128),
        fields.Field("linear_conv_kernel_dim", "kimi_delta_attention.d_conv", 4),
        fields.Field("num_attention_heads", "latent_attention.n_heads", 32),
        fields.Field("qk_nope_head_dim", "latent_attention.d_head", 128),
        fields.Field("qk_rope_head_dim", "latent_attention.d_rotary", 64),
        fields.Field("kv_lora_rank", "latent_attention.d_latent", 512),
        fields.Field("num_experts", "moe.experts", 256),
        fields.Field("num_experts_per_token", "moe.top_k", 8),
        fields.Field("num_shared_experts", "moe.shared", 1),
        fields.Field("moe_intermediate_size", "moe.d_hidden", 1024),
        fields.Field("moe_renormalize", "moe.normalise", True),
        fields.Field("routed_scaling_factor", "moe.scale", 2.446),
    ),
    "num_key_value_heads v_head_dim layer_types mlp_layer_types linear_attn_config "
    "first_k_dense_replace",
    {
        **SILU,
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
    "tie_word_embeddings use_grouped_topk",
)


def kimi_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Kimi-Linear."""
    delta = section(settings, "linear_attn_config")
    if unknown := sorted(delta.keys() - {*_DELTA, *_LAYERS}):
        raise InputError(f"linear_attn_config with {unknown[0]} is not supported")
    settings = {**settings, **{_DELTA[n]: delta[n] for n in _DELTA if n in delta}}
    model, layers = FIELDS.read(settings)
    latent = layers["latent_attention"]
    for name, wanted, default in (
        ("v_head_dim", latent["d_head"], 128),
        ("num_key_value_heads", latent["n_heads"], 32),
    ):
        given = settings.get(name, default)
        if given != wanted and (given is not None or name == "v_head_dim"):
            raise InputError(f"{name} must be {wanted} here, got {given!r:.20}")
    latent["position"] = "none"
    layers["moe"] |= {"scores": "sigmoid", "correction": True}
    sparse = _sparse(settings)
    mixers = [_WORDS[word] for word in _types(settings, delta)]
    found = fields.composed(mixers, sparse, layers)
    # transformers ignores tie_word_embeddings in this family
    return ModelConfig(**found, norm="rms", tie_embeddings=False, **model)


def _types(settings: Settings, delta: Settings) -> list[str]:
    """The kind of each layer; lists in ``linear_attn_config`` count from 1."""
    if types := fields.layer_types(settings, "layer_types", known=tuple(_WORDS)):
        return types
    n = fields.layer_count(settings)
    full, linear = (fields.layer_indices(delta, name) for name in _LAYERS)
    if full is None or linear is None:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(n)]
    if sorted([*full, *linear]) != list(range(1, n + 1)):
        raise InputError(f"{' and '.join(_LAYERS)} must name each of {n} layers once")
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(n)]


def _sparse(settings: Settings) -> list[bool]:
    """Whether each layer has experts."""
    n, first = fields.layer_count(settings), settings.get("first_k_dense_replace", 1)
    if settings.get("mlp_layer_types") is None:
        if first != 0:
            first = count(settings, "first_k_dense_replace", 1)
        return [i >= first for i in range(n)]
    types = fields.layer_types(settings, "mlp_layer_types", known=("dense", "sparse"))
    return [word == "sparse" for word in types or []]


def kimi_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`kimi_config`."""
    blocks = groups(config, NAMES)
    words = {ours: official for official, ours in _WORDS.items()}
    latent = first_keywords(blocks, "latent_attention")
    return {
        **FIELDS.write(config, blocks),
        "tie_word_embeddings": False,
        "num_key_value_heads": latent["n_heads"],
        "pad_token_id": None,  # the default is the number of a token of the published models
        "v_head_dim": latent["d_head"],
        "layer_types": [words[mixer.name] for mixer, _ in blocks],
        "mlp_layer_types": ["sparse" if b.name == "moe" else "dense" for _, b in blocks],
    }


CONVERTERS = {
    "kimi_linear": Converter(
        "Kimi-Linear of Hugging Face transformers",
        NAMES,
        kimi_config,
        kimi_settings,
        {"kimi_linear": "KimiLinearForCausalLM"},
    )
}
"""By ``model_type``."""
