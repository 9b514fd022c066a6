"""GPT-2, GPT-Neo and OPT: learned positions, layer norms, ungated feed-forwards."""

from itertools import islice
from typing import Any

from stateline.errors import InputError
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.fields import Draft, Fields, Rule, field
from stateline.models.convert.gpt_neox import activation, activation_back
from stateline.models.convert.parts import Names, Written
from stateline.models.convert.weights import count

_GPT2 = Names(
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
_NEO = _GPT2._replace(
    mixers=("attention", "sliding_attention"),
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    out="attn.attention.out_proj",
    transposed=False,
)
_OPT = Names(
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
)


def _feed_forward(hidden: str, default: str) -> Rule:
    """The field with the hidden width, and the activation."""

    def read(draft: Draft) -> None:
        width = 4 * draft.model["d_model"]
        given = draft.settings.get(hidden) is not None
        draft.put("feed_forward.d_hidden", count(draft.settings, hidden) if given else width)
        draft.put("feed_forward", activation(draft.settings, "activation_function", default))

    def write(model: Written) -> dict[str, Any]:
        if model.config.max_len is None:
            raise InputError("models of this family have learned positions, got max_len=None")
        width = model.first("feed_forward")["d_hidden"]
        return {hidden: width, "activation_function": activation_back(model.config)}

    return Rule(f"{hidden} activation_function", read, write)


_LOCAL = {"global": "attention", "local": "sliding_attention"}


def _read_local(draft: Draft) -> None:
    """Kinds of the layers; the setting has the form ``[[["global", "local"], 12]]``."""
    settings, n = draft.settings, fields.layer_count(draft.settings, "num_layers")
    try:
        stated = settings.get("attention_types") or [[["global", "local"], 12]]
        each = (word for words, repeat in stated for _ in range(repeat) for word in words)
        if settings.get("attention_layers") is not None:  # transformers prefers it
            stated = each = settings["attention_layers"]
        types = [_LOCAL[word] for word in islice(each, n + 1)]
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"cannot read attention_types={stated!r:.80}") from error
    if len(types) != n:
        raise InputError(f"attention_types states {len(types)} layers, and num_layers {n}")
    draft.mixers = types
    draft.put("sliding_attention.window", count(settings, "window_size", 256))


def _write_local(model: Written) -> dict[str, Any]:
    words = {ours: official for official, ours in _LOCAL.items()}
    types = [[[words[mixer.name]], 1] for mixer, _ in model.blocks]
    sliding = bool(model.numbers("sliding_attention"))
    window = {"window_size": model.first("sliding_attention")["window"]} if sliding else {}
    return {"attention_types": types, **window}


_EPS = field("layer_norm_epsilon", "norm_eps", 1e-5)
_LONGEST = field("max_position_embeddings", "max_len")
_FIXED = {"norm": "layer", "attention.bias": True, "feed_forward.bias": True}
_GPT2_FIELDS = Fields(
    (
        fields.VOCABULARY,
        field("n_embd", "d_model"),
        field("n_head", "attention.n_heads"),
        field("n_positions", "max_len"),
        _EPS,
        field("tie_word_embeddings", "tie_embeddings", True),
        _feed_forward("n_inner", "gelu_new"),
        field("scale_attn_weights", "attention.score_scale", True, {True: None, False: 1.0}),
    ),
    {"scale_attn_by_inverse_layer_idx": (False,)},
    "n_ctx n_special output_past predict_special_tokens reorder_and_upcast_attn",
    _FIXED,
    "n_layer",
)
_NEO_FIELDS = Fields(
    (
        *fields.TIED,
        field("num_heads", "attention.n_heads"),
        _LONGEST,
        _EPS,
        _feed_forward("intermediate_size", "gelu_new"),
        Rule("attention_types attention_layers window_size", _read_local, _write_local),
    ),
    fixed={**_FIXED, "attention.bias": "out", "attention.score_scale": 1.0},
    depth="num_layers",
)
_OPT_FIELDS = Fields(
    (
        *fields.TIED,
        field("num_attention_heads", "attention.n_heads"),
        _LONGEST,
        _feed_forward("ffn_dim", "relu"),
        *(field("enable_bias", f"{p}.bias", True) for p in ("attention", "feed_forward")),
        Rule(
            "word_embed_proj_dim",
            lambda draft: fields.agree(draft.settings, word_embed_proj_dim=draft.model["d_model"]),
            lambda model: {"word_embed_proj_dim": model.config.d_model},
        ),
    ),
    {
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    "activation_dropout init_std layerdrop",
    {"norm": "layer"},
)

CONVERTERS = {
    "gpt2": family(_GPT2, _GPT2_FIELDS, gpt2="GPT2LMHeadModel"),
    "gpt_neo": family(_NEO, _NEO_FIELDS, gpt_neo="GPTNeoForCausalLM"),
    "opt": family(_OPT, _OPT_FIELDS, opt="OPTForCausalLM"),
}
"""By ``model_type``."""
