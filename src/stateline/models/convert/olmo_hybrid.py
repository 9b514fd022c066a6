"""OLMo-hybrid: gated delta nets, and attention whose norms follow the layers."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.decoders import BIAS, GATED, NORM, SILU
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.parts import first_keywords, groups
from stateline.models.convert.weights import count, section

_NORMS = ("attention_layer_norm", "feedforward_layer_norm")


def _spelled(name: str) -> str:
    """The name that transformers writes; it also reads the names of its modules."""
    for module, written in zip(DECODER.norms, _NORMS, strict=True):
        name = name.replace(f".{module}.", f".{written}.")
    return name


NAMES = DECODER._replace(
    mixers=("gated_delta_net", "attention"),
    norms=_NORMS,
    norms_after=(_NORMS[1], "post_feedforward_layernorm"),
    spell=lambda found: {name: _spelled(name) for name in found},
    inner="linear_attn.",
    delta=("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"),
)
_WORDS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
FIELDS = fields.Fields(
    (
        *GATED,
        BIAS,
        NORM,
        NORM._replace(ours="attention.norm_eps"),
        fields.Field("linear_conv_kernel_dim", "gated_delta_net.d_conv", 4),
        fields.Field("linear_allow_neg_eigval", "gated_delta_net.reflects", True),
    ),
    f"{fields.HEADS} {fields.ROPE} layer_types linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim",
    SILU,
    # of initial values
    "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min",
)


def olmo_hybrid_config(settings: Settings) -> ModelConfig:
    """Our configuration of an OLMo-hybrid."""
    model, layers = FIELDS.read(settings)
    n, heads = fields.layer_count(settings), fields.heads(settings)
    given = {name: value for name, value in settings.items() if value is not None}
    n_keys = count(given, "linear_num_key_heads", count(settings, "num_attention_heads"))
    d_key = count(given, "linear_key_head_dim", int(0.75 * model["d_model"] / n_keys))
    layers["gated_delta_net"] |= {
        "n_heads": count(given, "linear_num_value_heads", count(settings, "num_attention_heads")),
        "n_key_heads": n_keys,
        "d_key": d_key,
        "expand_v": count(given, "linear_value_head_dim", 2 * d_key) / d_key,
    }
    rope = section(settings, "rope_scaling") or section(settings, "rope_parameters")
    rotated = rope.get("rope_theta", settings.get("rope_theta", 0.0)) is not None
    layers["attention"] |= {
        **heads,
        **(fields.rope(settings) if rotated else {}),
        "qk_norm": "joint",
    }
    types = fields.layer_types(settings, "layer_types", known=tuple(_WORDS))
    linear = [i % 4 != 3 and not (n < 4 and i == n - 1) for i in range(n)]
    types = types or ["linear_attention" if word else "full_attention" for word in linear]
    if len(set(types)) < 2:
        raise InputError(f"layers of an OLMo-hybrid are of both kinds, got only {types[0]}")
    found = fields.composed([_WORDS[word] for word in types], [False] * n, layers)
    return ModelConfig(**found, norm="rms", norm_after="attention", **model)


def olmo_hybrid_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`olmo_hybrid_config`."""
    blocks = groups(config, NAMES)
    delta, attention = (first_keywords(blocks, name) for name in NAMES.mixers)
    words = {ours: official for official, ours in _WORDS.items()}
    settings = {
        **FIELDS.write(config, blocks),
        "pad_token_id": None,  # the default is the number of a token of the published models
        "linear_num_key_heads": delta["n_key_heads"],
        "linear_num_value_heads": delta["n_heads"],
        "linear_key_head_dim": delta["d_key"],
        "linear_value_head_dim": round(delta["expand_v"] * delta["d_key"]),
        "layer_types": [words[mixer.name] for mixer, _ in blocks],
    }
    nowhere = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return settings | (nowhere if attention["position"] == "none" else {})


CONVERTERS = {
    "olmo_hybrid": Converter(
        "OLMo-hybrid of Hugging Face transformers",
        NAMES,
        olmo_hybrid_config,
        olmo_hybrid_settings,
        {"olmo_hybrid": "OlmoHybridForCausalLM"},
    )
}
"""By ``model_type``."""
