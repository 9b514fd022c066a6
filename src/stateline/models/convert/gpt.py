"""GPT-2, GPT-Neo and OPT: learned positions, layer norms, ungated feed-forwards."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.gpt_neox import ACTIVATIONS
from stateline.models.convert.parts import Names, Part, blocks
from stateline.models.convert.settings import layer_count, only, runs
from stateline.models.convert.weights import count, number
from stateline.models.pattern import Value

Settings = Mapping[str, Any]

_GPT = Names(
    base="transformer.",
    embedding="transformer.wte",
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
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        transposed=False,
    ),
    "opt": Names(
        base="model.",
        embedding="model.decoder.embed_tokens",
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
MIXERS = {
    "gpt2": ("attention",),
    "gpt_neo": ("attention", "sliding_attention"),
    "opt": ("attention",),
}
_SIZES = {
    "gpt2": ("n_embd", "n_layer", "n_head", "n_positions"),
    "gpt_neo": ("hidden_size", "num_layers", "num_heads", "max_position_embeddings"),
    "opt": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
}
"""Names of width, number of layers and of heads, and of the longest input."""

_HIDDEN = {"gpt2": "n_inner", "gpt_neo": "intermediate_size", "opt": "ffn_dim"}
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "opt": "OPTForCausalLM",
}
_LOCAL = {"global": "attention", "local": "sliding_attention"}


def gpt_config(settings: Settings) -> ModelConfig:
    """Our configuration of a GPT-2, GPT-Neo or OPT.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = gpt_config({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2,
        ...                      "n_head": 4, "n_positions": 16})
        >>> config.pattern, config.max_len
        ('attention*2', 16)
    """
    kind = settings["model_type"]
    width, depth, many, longest = _SIZES[kind]
    d_model, n_heads, max_len = (count(settings, name) for name in (width, many, longest))
    n_layers = layer_count(settings, depth)
    activation = str(settings.get("activation_function", "relu" if kind == "opt" else "gelu_new"))
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    attention: dict[str, Value] = {"n_heads": n_heads, "bias": True}
    types = ["attention"] * n_layers
    biased = True
    if kind == "gpt2":
        only(settings, add_cross_attention=False, scale_attn_by_inverse_layer_idx=False)
        if not settings.get("scale_attn_weights", True):
            attention["score_scale"] = 1.0
    elif kind == "gpt_neo":
        attention |= {"bias": "out", "score_scale": 1.0}
        types = _local(settings, n_layers)
    else:
        only(settings, do_layer_norm_before=True, _remove_final_layer_norm=False)
        only(settings, layer_norm_elementwise_affine=True, word_embed_proj_dim=d_model)
        biased = bool(settings.get("enable_bias", True))
        attention["bias"] = biased
    d_hidden = settings.get(_HIDDEN[kind])
    feed_forward: dict[str, Value] = {"d_hidden": 4 * d_model if d_hidden is None else d_hidden}
    layers: dict[str, dict[str, Value]] = {"attention": attention}
    if "sliding_attention" in types:
        window = count(settings, "window_size", 256)
        layers["sliding_attention"] = {**attention, "window": window}
    layers["feed_forward"] = feed_forward if biased else {**feed_forward, "bias": False}
    return ModelConfig(
        runs(types),
        vocab_size=count(settings, "vocab_size"),
        d_model=d_model,
        norm_eps=1e-5 if kind == "opt" else number(settings, "layer_norm_epsilon", 1e-5),
        feed_forward=ACTIVATIONS[activation],  # type: ignore[arg-type]  # one of its words
        tie_embeddings=settings.get("tie_word_embeddings", True),
        max_len=max_len,
        layers=layers,
    )


def _local(settings: Settings, n_layers: int) -> list[str]:
    """Kinds of the layers, which are stated as ``[[["global", "local"], 12]]``."""
    try:
        stated = settings.get("attention_types") or [[["global", "local"], n_layers // 2]]
        each = (word for words, repeat in stated for _ in range(repeat) for word in words)
        types = [_LOCAL[word] for word in islice(each, n_layers + 1)]
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"cannot read attention_types={stated!r}") from error
    if len(types) != n_layers:
        raise InputError(f"attention_types states {len(types)} layers, and num_layers {n_layers}")
    return types


def gpt_names(config: ModelConfig, kind: str) -> list[Part]:
    """All tensors, by our names and theirs."""
    return decoder_parts(config, NAMES[kind], MIXERS[kind])


def gpt_settings(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`gpt_config`.

    Raises:
        InputError: If the model is not of this family.
    """
    pairs = blocks(config, MIXERS[kind])
    mixer, feed_forward = pairs[0]
    activation = {ours: official for official, ours in ACTIVATIONS.items()}
    ours = feed_forward.keywords["activation"]
    if ours not in activation or config.max_len is None:
        raise InputError(
            "models of this family have learned positions (max_len) and feed-forwards without "
            f"gates, got max_len={config.max_len} and {ours}"
        )
    sizes = (config.d_model, len(pairs), mixer.keywords["n_heads"], config.max_len)
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        **dict(zip(_SIZES[kind], sizes, strict=True)),
        _HIDDEN[kind]: feed_forward.keywords["d_hidden"],
        "activation_function": activation[ours],
        "tie_word_embeddings": config.tie_embeddings,
    }
    if kind == "opt":
        return settings | {
            "word_embed_proj_dim": config.d_model,
            "enable_bias": bool(mixer.keywords["bias"]),
        }
    settings["layer_norm_epsilon"] = config.norm_eps
    if kind == "gpt2":
        return settings | {"scale_attn_weights": mixer.keywords["score_scale"] is None}
    words = {ours: official for official, ours in _LOCAL.items()}
    settings["attention_types"] = [[[words[mixer.name]], 1] for mixer, _ in pairs]
    windows = [m.keywords["window"] for m, _ in pairs if m.name == "sliding_attention"]
    return settings | ({"window_size": windows[0]} if windows else {})
