"""RWKV-7 as flash-linear-attention writes it for transformers."""

from typing import Any

from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import family
from stateline.models.convert.decoder_parts import decoder_parts
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, field
from stateline.models.convert.parts import Names, Part, Place, Written, model_layers
from stateline.models.convert.weights import count, number

_WRAPPER = "value_residual"
NAMES = Names(
    embedding="model.embeddings",
    mixers=("rwkv7",),
    ends=("channel_mixing",),
    wrapper=_WRAPPER,
    base="model.",
    embedding_norm="model.layers.0.pre_norm",
    norm="model.norm",
    layer="model.layers.{}.",
    norms=("attn_norm", "ffn_norm"),
    inner="attn.",
)


def _read(draft: Draft) -> None:
    width, n = draft.model["d_model"], fields.layer_count(draft.settings)
    given = {name: value for name, value in draft.settings.items() if value is not None}
    heads = width // count(given, "head_dim", 64)
    if "head_dim" not in given:  # otherwise the code does not read the number
        heads = count(given, "num_heads", heads)
    fields.agree({"a_low_rank_dim": 64, **given}, a_low_rank_dim=draft.layers["rwkv7"]["rank"])
    if given.get("value_dim") != [width] * n:
        fields.agree(given, value_dim=width)
    draft.put("rwkv7.n_heads", heads)
    hidden = -(-int(number(given, "hidden_ratio", 4.0) * width) // 32) * 32
    draft.put("channel_mixing.d_hidden", count(given, "intermediate_size", hidden))
    draft.put("pattern", f"{_WRAPPER}((rwkv7 channel_mixing)*{n})")


def _write(model: Written) -> dict[str, Any]:
    time, width = model.first("rwkv7"), model.config.d_model
    return {
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


def _parts(config: ModelConfig, _: Settings) -> list[Part]:
    """All tensors of a model."""
    parts = decoder_parts(config, NAMES)
    (wrapper,) = model_layers(config)
    for i in range(1, len(wrapper.parts) // 2):
        place = Place(f"{NAMES.layer.format(i)}attn.v_lora.lora.", f"{wrapper.path}mixes.{i - 1}.")
        parts += place.same("down.weight:0.weight up.*:2.*")
    return parts


CONVERTERS = {"rwkv7": family(NAMES, FIELDS, rwkv7="RWKV7ForCausalLM")._replace(parts=_parts)}
"""By ``model_type``."""
