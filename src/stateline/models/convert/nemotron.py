"""Nemotron-H without experts: Mamba-2, attention and feed-forwards, each in a branch of its own."""

from typing import Any

from stateline.errors import InputError
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.mamba import unlimited
from stateline.models.convert.parts import Names, first_keywords, groups, inner_width
from stateline.models.convert.settings import (
    HIDDEN,
    VOCABULARY,
    WIDTH,
    Field,
    Fields,
    heads,
    heads_back,
    runs,
)
from stateline.models.convert.weights import count

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


_EPS = Field("layer_norm_epsilon", "norm_eps", 1e-5)
FIELDS = Fields(
    (
        VOCABULARY,
        WIDTH,
        HIDDEN,
        _EPS,
        Field("ssm_state_size", "mamba2.d_state", 128),
        Field("mamba_head_dim", "mamba2.d_head", 64),
        Field("n_groups", "mamba2.n_groups", 8),
        Field("conv_kernel", "mamba2.d_conv", 4),
        Field("use_bias", "mamba2.bias", False),
        Field("use_conv_bias", "mamba2.conv_bias", True),
        _EPS._replace(ours="mamba2.norm_eps"),
        Field("mlp_bias", "feed_forward.bias", False),
    ),
    {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
)


def nemotron_h_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Nemotron-H without experts.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    model, layers = FIELDS.read(settings)
    unlimited(settings, "time_step_limit")
    inner = count(settings, "mamba_num_heads", 128) * count(settings, "mamba_head_dim", 64)
    layers["attention"] = heads({"head_dim": 128, **settings}, 8)
    layers["mamba2"]["expand"] = inner / model["d_model"]
    layers["feed_forward"]["activation"] = "relu2"
    return ModelConfig(
        runs(_layers(settings)),
        norm="rms",
        feed_forward="none",
        tie_embeddings=False,  # transformers ignores tie_word_embeddings in this family
        layers=layers,
        **model,
    )


def _layers(settings: Settings) -> list[str]:
    """Our name of each layer, of a list of words or of a text with a sign for each."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    stated = next((settings[name] for name in names if settings.get(name)), None)
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
    """The ``config.json`` of our model; the inverse of :func:`nemotron_h_config`.

    Raises:
        InputError: If the model does not consist of Mamba-2, attention and feed-forwards, each in
            a branch of its own and at least one of each kind.
    """
    blocks = groups(config, NAMES)
    mamba2 = first_keywords(blocks, "mamba2")
    words = {ours: official for official, ours in _WORDS.items()}
    return {
        **FIELDS.write(config, blocks),
        **heads_back(first_keywords(blocks, "attention")),
        "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,
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
