"""Gated delta nets and attention: Qwen3-Next, Qwen3.5 and OLMo-hybrid."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, family
from stateline.models.convert.decoders import (
    EXPERTS,
    LOSS,
    NAMES,
    all_sparse,
    shared_expert,
    some_sparse,
)
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, field
from stateline.models.convert.parts import Written
from stateline.models.convert.weights import count, section

_PARTS = NAMES._replace(mixers=("gated_delta_net", "attention"), inner="linear_attn.")
_WORDS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
_CONV = field("linear_conv_kernel_dim", "gated_delta_net.d_conv", 4)


def _read_values(draft: Draft) -> None:
    width = count(draft.settings, "linear_value_head_dim", 128)
    draft.put("gated_delta_net.expand_v", width / draft.layers["gated_delta_net"]["d_key"])


def _write_values(model: Written) -> dict[str, Any]:
    delta = model.first("gated_delta_net")
    return {"linear_value_head_dim": round(delta["expand_v"] * delta["d_key"])}


def _every_fourth(draft: Draft) -> list[str]:
    every = count(draft.settings, "full_attention_interval", 4)
    places = range(1, fields.layer_count(draft.settings) + 1)
    return ["linear_attention" if i % every else "full_attention" for i in places]


def _qwen(kv_heads: int, *rules: Rule, inert: str = "") -> Fields:
    """The fields of a family, from its number of key heads, its own rules and inert fields."""
    return Fields(
        (
            *rules,
            fields.BIAS,
            *fields.norms(1e-6, "attention", "gated_delta_net"),
            field("linear_num_value_heads", "gated_delta_net.n_heads", 32),
            field("linear_num_key_heads", "gated_delta_net.n_key_heads", 16),
            field("linear_key_head_dim", "gated_delta_net.d_key", 128),
            _CONV,
            Rule("linear_value_head_dim", _read_values, _write_values),
            fields.heads(kv_heads, 256),
            fields.rope(fraction=0.25),
            fields.kinds(
                {**fields.FULL, **_WORDS}, _every_fourth, others="full_attention_interval"
            ),
        ),
        {
            **fields.SILU,
            "attn_output_gate": (True,),
            "output_gate_type": ("swish",),
            "use_sliding_window": (False,),
        },
        # multi-token prediction in training, and precisions
        f"{LOSS} mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings {inert}",
        {"norm": "rms_offset", "attention.qk_norm": "offset", "attention.gated": True},
    )


_NEXT = _qwen(
    2,
    *fields.ENDS,
    fields.hidden(5632),
    *some_sparse(512, 10, 512, normalise=True),
    shared_expert(512),
)
_DENSE = _qwen(
    4,
    *fields.GATED,
    # of a model with experts
    inert="decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts "
    "num_experts_per_tok shared_expert_intermediate_size",
)
_SPARSE = _qwen(
    2,
    *fields.ENDS,
    *all_sparse(256, 8, 512, width_name="moe_intermediate_size"),
    shared_expert(512),
    # the weights of experts are always normalised
    inert="decoder_sparse_step mlp_only_layers intermediate_size norm_topk_prob",
)

_TOP = Fields(
    (Rule("text_config tie_word_embeddings", lambda _: None),),
    inert="image_token_id language_model_only video_token_id vision_config vision_end_token_id "
    "vision_start_token_id",
    depth="",
)
"""Fields of a model that also reads images, outside its part for text."""


def _text_first(converter: Converter) -> Converter:
    """The converter, also for models that read images: it reads their part for text."""

    def config(settings: Settings) -> ModelConfig:
        if not settings.get("text_config"):
            return converter.config(settings)
        _TOP.read(settings)
        text = section(settings, "text_config")
        tied = settings.get("tie_word_embeddings", wanted := text.get("tie_word_embeddings", False))
        if tied != wanted:
            raise InputError(
                f"tie_word_embeddings must be the same in text_config, got {tied} and {wanted}"
            )
        return converter.config(text)

    return converter._replace(config=config)


def _read_delta(draft: Draft) -> None:
    given = {name: value for name, value in draft.settings.items() if value is not None}
    n_heads = count(given, "num_attention_heads")
    n_keys = count(given, "linear_num_key_heads", n_heads)
    d_key = count(given, "linear_key_head_dim", int(0.75 * draft.model["d_model"] / n_keys))
    draft.layers["gated_delta_net"] |= {
        "n_heads": count(given, "linear_num_value_heads", n_heads),
        "n_key_heads": n_keys,
        "d_key": d_key,
        "expand_v": count(given, "linear_value_head_dim", 2 * d_key) / d_key,
    }


def _write_delta(model: Written) -> dict[str, Any]:
    delta = model.first("gated_delta_net")
    return {
        "pad_token_id": None,  # the default is the number of a token of the published models
        "linear_num_key_heads": delta["n_key_heads"],
        "linear_num_value_heads": delta["n_heads"],
        "linear_key_head_dim": delta["d_key"],
        **_write_values(model),
    }


_ROPE = fields.rope()


def _read_positions(draft: Draft) -> None:
    given = section(draft.settings, "rope_scaling") or section(draft.settings, "rope_parameters")
    if given.get("rope_theta", draft.settings.get("rope_theta", 0.0)) is not None:
        _ROPE.read(draft)


def _write_positions(model: Written) -> dict[str, Any]:
    nowhere = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return {**_ROPE.write(model)} or nowhere


def _olmo_kinds(draft: Draft) -> list[str]:
    n = fields.layer_count(draft.settings)
    full = [i % 4 == 3 or (n < 4 and i == n - 1) for i in range(n)]
    return ["full_attention" if one else "linear_attention" for one in full]


def _check_both(draft: Draft) -> None:
    if len(found := set(draft.mixers)) < 2:
        words = {ours: word for word, ours in _WORDS.items()}
        raise InputError(
            f"layers of an OLMo-hybrid are of both kinds, got only {words[found.pop()]}"
        )


_NORMS = ("attention_layer_norm", "feedforward_layer_norm")


def _spelled(name: str) -> str:
    """The name that transformers writes; it also reads the names of its modules."""
    for module, written in zip(NAMES.norms, _NORMS, strict=True):
        name = name.replace(f".{module}.", f".{written}.")
    return name


_OLMO = Fields(
    (
        *fields.GATED,
        fields.BIAS,
        *fields.norms(1e-6, "attention"),
        _CONV,
        field("linear_allow_neg_eigval", "gated_delta_net.reflects", True),
        fields.heads(),
        Rule(
            "linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim",
            _read_delta,
            _write_delta,
        ),
        Rule(_ROPE.official, _read_positions, _write_positions),
        fields.kinds(_WORDS, _olmo_kinds),
        Rule("", _check_both),
    ),
    fields.SILU,
    # of initial values
    "linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min",
    {"norm_after": "attention", "attention.qk_norm": "joint"},
)

_QWEN35 = _PARTS._replace(
    delta=("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    # of files that also read images
    spell=lambda found: {n: n.replace("model.language_model.", "model.", 1) for n in found},
)
CONVERTERS = {
    "qwen3_next": family(
        _PARTS._replace(delta=("in_proj_qkvz", "in_proj_ba"), experts=EXPERTS),
        _NEXT,
        qwen3_next="Qwen3NextForCausalLM",
    ),
    "qwen3_5_text": _text_first(
        family(
            _QWEN35,
            _DENSE,
            qwen3_5_text="Qwen3_5ForCausalLM",
            qwen3_5="Qwen3_5ForConditionalGeneration",
        )
    ),
    "qwen3_5_moe_text": _text_first(
        family(
            _QWEN35._replace(experts=EXPERTS),
            _SPARSE,
            qwen3_5_moe_text="Qwen3_5MoeForCausalLM",
            qwen3_5_moe="Qwen3_5MoeForConditionalGeneration",
        )
    ),
    "olmo_hybrid": family(
        _PARTS._replace(
            norms=_NORMS,
            norms_after=(_NORMS[1], "post_feedforward_layernorm"),
            spell=lambda found: {name: _spelled(name) for name in found},
            delta=("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"),
        ),
        _OLMO,
        olmo_hybrid="OlmoHybridForCausalLM",
    ),
}
"""By ``model_type``."""
