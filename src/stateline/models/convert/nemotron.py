"""Nemotron-H without experts: Mamba-2, attention and feed-forwards, each in a branch of its own."""

from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.mamba2 import default_head
from stateline.models.build import MAX_LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.mamba import unlimited
from stateline.models.convert.parts import Names, Part, first_keywords, single_branches
from stateline.models.convert.settings import heads, heads_back, only, runs
from stateline.models.convert.weights import count, number

Settings = Mapping[str, Any]

NAMES = Names(
    base="backbone.",
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    norms=("norm",),
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    inner="mixer.",
)
_LAYERS = ("mamba2", "attention", "feed_forward")
_WORDS = {"linear_attention": "mamba2", "full_attention": "attention", "mlp": "feed_forward"}
_OLD_WORDS = {"mamba": "mamba2", "attention": "attention"}
_SIGNS = {"M": "mamba2", "*": "attention", "-": "feed_forward"}


def nemotron_h_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Nemotron-H without experts.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    only(settings, mlp_hidden_act="relu2", mamba_hidden_act="silu")
    unlimited(settings, "time_step_limit")
    d_model, eps = count(settings, "hidden_size"), number(settings, "layer_norm_epsilon", 1e-5)
    n_heads = count(settings, "mamba_num_heads", 128)
    d_head = count(settings, "mamba_head_dim", 64)
    return ModelConfig(
        runs(_layers(settings)),
        vocab_size=count(settings, "vocab_size"),
        d_model=d_model,
        norm="rms",
        norm_eps=eps,
        feed_forward="none",
        tie_embeddings=False,  # transformers ignores tie_word_embeddings in this family
        layers={
            "attention": heads({"head_dim": 128, **settings}, 8),
            "mamba2": {
                "d_state": count(settings, "ssm_state_size", 128),
                "d_head": d_head,
                "n_groups": count(settings, "n_groups", 8),
                "d_conv": count(settings, "conv_kernel", 4),
                "expand": n_heads * d_head / d_model,
                "bias": bool(settings.get("use_bias", False)),
                "norm_eps": eps,
            },
            "feed_forward": {
                "activation": "relu2",
                "d_hidden": count(settings, "intermediate_size"),
                "bias": bool(settings.get("mlp_bias", False)),
            },
        },
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


def nemotron_h_names(config: ModelConfig) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, NAMES, _LAYERS)


def nemotron_h_settings(config: ModelConfig, conv_bias: bool) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`nemotron_h_config`.

    Raises:
        InputError: If the model does not consist of Mamba-2, attention and feed-forwards, each in
            a branch of its own and at least one of each kind.
    """
    groups = single_branches(config, _LAYERS)
    mamba2, attention, feed_forward = (first_keywords(groups, name) for name in _LAYERS)
    inner = int(mamba2["expand"] * config.d_model)
    d_head = mamba2["d_head"] or default_head(inner)
    words = {ours: official for official, ours in _WORDS.items()}
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": feed_forward["d_hidden"],
        "mlp_bias": feed_forward["bias"],
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": False,
        **heads_back(attention),
        "mamba_num_heads": inner // d_head,
        "mamba_head_dim": d_head,
        "n_groups": mamba2["n_groups"],
        "ssm_state_size": mamba2["d_state"],
        "conv_kernel": mamba2["d_conv"],
        "use_bias": mamba2["bias"],
        "use_conv_bias": conv_bias,
        "layers_block_type": [words[layer.name] for (layer,) in groups],
    }
