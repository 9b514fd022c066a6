"""RWKV-7 as flash-linear-attention writes it for transformers."""

from typing import Any

from stateline.errors import InputError
from stateline.layers.mixers.rwkv7 import MIXED
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, Written, field
from stateline.models.convert.parts import Change, Layer, Names, Part, Place, expanded, layer_of
from stateline.models.convert.weights import count, number
from stateline.models.pattern import parse_pattern

_WRAPPER = "value_residual"
NAMES = Names(embedding="model.embeddings", base="model.", norm="model.norm")


def _read(draft: Draft) -> None:
    width, n = draft.model["d_model"], fields.layer_count(draft.settings)
    given = {name: value for name, value in draft.settings.items() if value is not None}
    heads = width // count(given, "head_dim", 64)
    if "head_dim" not in given:  # otherwise the code does not read the number
        heads = count(given, "num_heads", heads)
    rank = draft.layers["rwkv7"]["rank"]
    for name, wanted in (("a_low_rank_dim", (rank,)), ("value_dim", (width, [width] * n))):
        if given.get(name, 64 if name == "a_low_rank_dim" else width) not in wanted:
            raise InputError(f"{name} must be {wanted[0]} here, got {given.get(name, 64)!r:.80}")
    draft.put("rwkv7.n_heads", heads)
    hidden = -(-int(number(given, "hidden_ratio", 4.0) * width) // 32) * 32
    draft.put("channel_mixing.d_hidden", count(given, "intermediate_size", hidden))
    draft.put("pattern", f"{_WRAPPER}((rwkv7 channel_mixing)*{n})")


def _write(model: Written) -> dict[str, Any]:
    time, width = model.first("rwkv7"), model.config.d_model
    return {
        "num_hidden_layers": len(model.numbers("rwkv7")),
        "a_low_rank_dim": time["rank"],
        "gate_low_rank_dim": time["gate_rank"] or 2 * time["rank"],
        "head_dim": width // time["n_heads"],
        "num_heads": time["n_heads"],
        "intermediate_size": model.first("channel_mixing")["d_hidden"],
    }


FIELDS = Fields(
    (
        *fields.ENDS,
        field("norm_first", "embedding_norm", True),
        *fields.several("rwkv7", "decay_low_rank_dim=rank:64 gate_low_rank_dim=gate_rank:128"),
        field("v_low_rank_dim", f"{_WRAPPER}.rank", 16),
        Rule(
            "a_low_rank_dim head_dim hidden_ratio intermediate_size num_heads value_dim",
            _read,
            _write,
        ),
    ),
    {"attn": (None,), "hidden_act": ("sqrelu",), "norm_bias": (True,), "norm_eps": (1e-5,)},
    "attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_norm max_position_embeddings "
    "use_l2warp",
    {"norm": "layer", "feed_forward": "none"},
)


def _layers(config: ModelConfig) -> tuple[Layer, list[Layer]]:
    """The wrapper and the layers inside it.

    Raises:
        InputError: If the model is none of RWKV-7 layers in such a wrapper.
    """
    items = parse_pattern(config.pattern)
    found = expanded(items[0].core, config)
    kinds = [layer.name for layer in found]
    fits = config.block == "sequential" and config.norm == "layer" and not config.head_bias
    one = len(items) == items[0].repeat == 1 and items[0].name == _WRAPPER
    if not (one and fits and kinds == ["rwkv7", "channel_mixing"] * (len(kinds) // 2)):
        raise InputError(
            f"models of this family are {_WRAPPER}((rwkv7 channel_mixing)*n) with norm='layer', "
            f"got {config.pattern!r}"
        )
    return layer_of(_WRAPPER, items[0].keywords, config), found


def _settings(config: ModelConfig) -> dict[str, Any]:
    wrapper, layers = _layers(config)
    return FIELDS.write(Written(config, [(layer,) for layer in (wrapper, *layers)]))


_ROW = Change(lambda t: t.view(1, -1), lambda t: t.view(1, 1, -1))
_TIME = (
    "removal:k_k writing:k_a bonus:r_k norm.*:g_norm.* out_proj.weight:o_proj.weight r_proj.weight "
    "k_proj.weight v_proj.weight decay_in.weight:w_lora.lora.0.weight "
    "decay_out.weight:w_lora.lora.2.weight decay_bias:w_lora.lora.2.bias "
    "rate_in.weight:a_lora.lora.0.weight rate_out.weight:a_lora.lora.2.weight "
    "rate_bias:a_lora.lora.2.bias gate_in.weight:g_lora.lora.0.weight "
    "gate_out.weight:g_lora.lora.2.weight"
)
_CHANNEL = "mix:x_k in_proj.weight:key.weight out_proj.weight:value.weight"
_VALUES = "down.weight:v_lora.lora.0.weight up.*:v_lora.lora.2.*"


def _parts(config: ModelConfig, _: Settings) -> list[Part]:
    """All tensors of a model."""
    parts = Place().same(f"embedding.weight:{NAMES.embedding}.weight norm.*:{NAMES.norm}.*")
    if config.embedding_norm:
        parts += Place().same("embedding_norm.*:model.layers.0.pre_norm.*")
    if not config.tie_embeddings:
        parts += Place().same(f"head.weight:{NAMES.head}.weight")
    for i in range(len(_layers(config)[1]) // 2):
        there = f"model.layers.{i}."
        time, channel = (f"stack.layers.0.core.layers.{2 * i + j}." for j in (0, 1))
        parts += Place(there, time).same("norm.*:attn_norm.*")
        parts += Place(there, channel).same("norm.*:ffn_norm.*")
        at = Place(f"{there}attn.", f"{time}layer.")
        mixed = [f"x_{name}" for name in MIXED]
        parts.append(at.part("mix", mixed, (1,) * len(mixed), changes=(_ROW,), anywhere=True))
        parts += at.same(_TIME)
        parts += Place(f"{there}ffn.", f"{channel}layer.").same(_CHANNEL)
        if i:
            parts += at._replace(here=f"stack.layers.0.mixes.{i - 1}.").same(_VALUES)
    return parts


CONVERTERS = {
    "rwkv7": family(NAMES, FIELDS, rwkv7="RWKV7ForCausalLM")._replace(
        settings=_settings, parts=_parts
    )
}
"""By ``model_type``."""
