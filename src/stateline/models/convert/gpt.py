"""GPT-2, GPT-Neo and OPT: learned positions, layer norms, ungated feed-forwards."""

from itertools import islice
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Settings, family
from stateline.models.convert.gpt_neox import activation, activation_back
from stateline.models.convert.parts import Names, first_keywords, groups
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
_TIED = fields.TIED._replace(default=True)
_EPS = fields.Field("layer_norm_epsilon", "norm_eps", 1e-5)
_LONGEST = fields.Field("max_position_embeddings", "max_len")
FIELDS = {
    "gpt2": fields.Fields(
        (
            fields.VOCABULARY,
            fields.Field("n_embd", "d_model"),
            fields.Field("n_head", "attention.n_heads"),
            fields.Field("n_positions", "max_len"),
            _EPS,
            _TIED,
        ),
        "n_inner activation_function scale_attn_weights",
        {"scale_attn_by_inverse_layer_idx": (False,)},
        "n_ctx n_special output_past predict_special_tokens reorder_and_upcast_attn",
        "n_layer",
    ),
    "gpt_neo": fields.Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            fields.Field("num_heads", "attention.n_heads"),
            _LONGEST,
            _EPS,
            _TIED,
        ),
        "intermediate_size activation_function attention_types attention_layers window_size",
        depth="num_layers",
    ),
    "opt": fields.Fields(
        (
            fields.VOCABULARY,
            fields.WIDTH,
            fields.Field("num_attention_heads", "attention.n_heads"),
            _LONGEST,
            _TIED,
        ),
        "ffn_dim activation_function word_embed_proj_dim enable_bias",
        {
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
        "activation_dropout init_std layerdrop",
    ),
}
"""By ``model_type``."""

_HIDDEN = {"gpt2": "n_inner", "gpt_neo": "intermediate_size", "opt": "ffn_dim"}
_ACTIVATION = {"gpt2": "gelu_new", "gpt_neo": "gelu_new", "opt": "relu"}


def gpt_config(settings: Settings, kind: str) -> ModelConfig:
    """Our configuration of a GPT-2, GPT-Neo or OPT."""
    model, layers = FIELDS[kind].read(settings)
    attention, n_layers = layers["attention"], fields.layer_count(settings, FIELDS[kind].depth)
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
        fields.runs(types),
        feed_forward=activation(settings, "activation_function", _ACTIVATION[kind]),
        layers={
            **fields.windowed(types, attention, window),
            "feed_forward": {"d_hidden": hidden, "bias": biased},
        },
        **model,
    )


def _local(settings: Settings, n_layers: int) -> list[str]:
    """Kinds of the layers; the setting has the form ``[[["global", "local"], 12]]``."""
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
    """The ``config.json`` of our model; the inverse of :func:`gpt_config`."""
    blocks = groups(config, NAMES[kind])
    attention = first_keywords(blocks, *NAMES[kind].mixers)
    if config.max_len is None:
        raise InputError("models of this family have learned positions, got max_len=None")
    settings: dict[str, Any] = {
        **FIELDS[kind].write(config, blocks),
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


_FUNCTIONS = gpt_config, gpt_settings
CONVERTERS = {
    "gpt2": family("gpt2", "GPT-2", NAMES["gpt2"], _FUNCTIONS, "GPT2LMHeadModel"),
    "gpt_neo": family("gpt_neo", "GPT-Neo", NAMES["gpt_neo"], _FUNCTIONS, "GPTNeoForCausalLM"),
    "opt": family("opt", "OPT", NAMES["opt"], _FUNCTIONS, "OPTForCausalLM"),
}
"""By ``model_type``."""
