"""GPT-2, GPT-Neo and OPT: learned positions, layer norms, ungated feed-forwards."""

from functools import partial
from itertools import islice
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.gpt_neox import activation, activation_back
from stateline.models.convert.parts import Names, first_keywords, groups
from stateline.models.convert.settings import (
    TIED,
    VOCABULARY,
    WIDTH,
    Field,
    Fields,
    layer_count,
    runs,
    windowed,
)
from stateline.models.convert.weights import count, flag

_GPT = Names(
    embedding="transformer.wte",
    mixers=("attention",),
    base="transformer.",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)
NAMES = {
    "gpt2": _GPT,
    "gpt_neo": _GPT._replace(
        mixers=("attention", "sliding_attention"),
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        transposed=False,
    ),
    "opt": Names(
        embedding="model.decoder.embed_tokens",
        mixers=("attention",),
        base="model.",
        positions="model.decoder.embed_positions",
        unused_positions=2,
        norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
    ),
}
_LOCAL = {"global": "attention", "local": "sliding_attention"}
_TIED = TIED._replace(default=True)
_EPS = Field("layer_norm_epsilon", "norm_eps", 1e-5)
_LONGEST = Field("max_position_embeddings", "max_len")
FIELDS = {
    "gpt2": Fields(
        (
            VOCABULARY,
            Field("n_embd", "d_model"),
            Field("n_head", "attention.n_heads"),
            Field("n_positions", "max_len"),
            _EPS,
            _TIED,
        ),
        "n_layer n_inner activation_function scale_attn_weights",
        {"scale_attn_by_inverse_layer_idx": (False,)},
        "n_ctx n_special output_past predict_special_tokens reorder_and_upcast_attn "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj",
    ),
    "gpt_neo": Fields(
        (VOCABULARY, WIDTH, Field("num_heads", "attention.n_heads"), _LONGEST, _EPS, _TIED),
        "num_layers intermediate_size activation_function attention_types attention_layers "
        "window_size",
    ),
    "opt": Fields(
        (VOCABULARY, WIDTH, Field("num_attention_heads", "attention.n_heads"), _LONGEST, _TIED),
        "num_hidden_layers ffn_dim activation_function word_embed_proj_dim enable_bias",
        {
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
        "activation_dropout init_std layerdrop",
    ),
}
"""By ``model_type``."""

_DEPTH = {"gpt2": "n_layer", "gpt_neo": "num_layers", "opt": "num_hidden_layers"}
_HIDDEN = {"gpt2": "n_inner", "gpt_neo": "intermediate_size", "opt": "ffn_dim"}
_ACTIVATION = {"gpt2": "gelu_new", "gpt_neo": "gelu_new", "opt": "relu"}


def gpt_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a GPT-2, GPT-Neo or OPT.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.
        kind: Which of them, by ``model_type``.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.
    """
    model, layers = FIELDS[kind].read(settings)
    attention, n_layers = layers["attention"], layer_count(settings, _DEPTH[kind])
    types, biased = ["attention"] * n_layers, True
    attention["bias"] = True
    if kind == "gpt2" and not flag(settings, "scale_attn_weights", True):
        attention["score_scale"] = 1.0
    if kind == "gpt_neo":
        attention |= {"bias": "out", "score_scale": 1.0}
        types = _local(settings, n_layers)
    if kind == "opt":
        if settings.get("word_embed_proj_dim", model["d_model"]) != model["d_model"]:
            raise InputError(
                f"word_embed_proj_dim={settings['word_embed_proj_dim']!r:.80} is not supported, "
                f"only the hidden_size, {model['d_model']}"
            )
        attention["bias"] = biased = flag(settings, "enable_bias", True)
    inner = _HIDDEN[kind]
    hidden = 4 * model["d_model"] if settings.get(inner) is None else count(settings, inner)
    window = count(settings, "window_size", 256) if kind == "gpt_neo" else None
    return ModelConfig(
        runs(types),
        feed_forward=activation(settings, "activation_function", _ACTIVATION[kind]),
        layers={
            **windowed(types, attention, window),
            "feed_forward": {"d_hidden": hidden, "bias": biased},
        },
        **model,
    )


def _local(settings: Settings, n_layers: int) -> list[str]:
    """Kinds of the layers, which are stated as ``[[["global", "local"], 12]]``."""
    try:
        stated = settings.get("attention_types") or [[["global", "local"], 12]]
        each = (word for words, repeat in stated for _ in range(repeat) for word in words)
        if settings.get("attention_layers") is not None:  # transformers prefers it
            stated = each = settings["attention_layers"]
        types = [_LOCAL[word] for word in islice(each, n_layers + 1)]
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"cannot read attention_types={stated!r:.80}") from error
    if len(types) != n_layers:
        raise InputError(f"attention_types states {len(types)} layers, and num_layers {n_layers}")
    return types


def gpt_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`gpt_config`.

    Raises:
        InputError: If the model is not of this family.
    """
    blocks = groups(config, NAMES[kind])
    attention = first_keywords(blocks, *NAMES[kind].mixers)
    if config.max_len is None:
        raise InputError("models of this family have learned positions, got max_len=None")
    settings: dict[str, Any] = {
        **FIELDS[kind].write(config, blocks),
        _DEPTH[kind]: len(blocks),
        _HIDDEN[kind]: blocks[0][1].keywords["d_hidden"],
        "activation_function": activation_back(config),
    }
    if kind == "opt":
        return settings | {
            "word_embed_proj_dim": config.d_model,
            "enable_bias": bool(attention["bias"]),
        }
    if kind == "gpt2":
        return settings | {"scale_attn_weights": attention["score_scale"] is None}
    words = {ours: official for official, ours in _LOCAL.items()}
    settings["attention_types"] = [[[words[mixer.name]], 1] for mixer, _ in blocks]
    windows = [m.keywords["window"] for m, _ in blocks if m.name == "sliding_attention"]
    return settings | ({"window_size": windows[0]} if windows else {})


def _converter(kind: str, title: str, architecture: str) -> Converter:
    return Converter(
        f"{title} of Hugging Face transformers",
        NAMES[kind],
        partial(gpt_config, kind=kind),
        partial(gpt_settings, kind=kind),
        {kind: architecture},
    )


CONVERTERS = {
    "gpt2": _converter("gpt2", "GPT-2", "GPT2LMHeadModel"),
    "gpt_neo": _converter("gpt_neo", "GPT-Neo", "GPTNeoForCausalLM"),
    "opt": _converter("opt", "OPT", "OPTForCausalLM"),
}
"""By ``model_type``."""
