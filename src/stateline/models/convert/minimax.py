"""MiniMax-01: lightning attention, attention, and experts, in blocks that add to normed inputs."""

from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.decoders import NORM, SILU
from stateline.models.convert.mixtures import MIXTRAL
from stateline.models.convert.parts import first_keywords, groups
from stateline.models.convert.qwen import LOSS
from stateline.models.convert.weights import number

NAMES = DECODER._replace(
    mixers=("lightning_attention", "attention"),
    inner="self_attn.",
    experts=MIXTRAL,
    blocks=("normed",),
)
_WORDS = {"linear_attention": "lightning_attention", "full_attention": "attention"}
_PLACES = ("full_attn", "linear_attn", "mlp")
_FACTORS = {"stream_multiplier": "alpha", "residual_multiplier": "beta"}
FIELDS = fields.Fields(
    (
        fields.VOCABULARY,
        fields.WIDTH,
        fields.TIED,
        NORM._replace(default=1e-5),
        fields.Field("num_local_experts", "moe.experts", 8),
        fields.Field("num_experts_per_tok", "moe.top_k", 2),
        fields.Field("intermediate_size", "moe.d_hidden", 14336),
    ),
    f"{fields.HEADS} {fields.ROPE} layer_types rotary_dim "
    + " ".join(f"{place}_{word}_factor" for place in _PLACES for word in _FACTORS.values()),
    {
        **SILU,
        "sliding_window": (None,),
        "block_size": (256,),
        "postnorm": (True,),
        "shared_intermediate_size": (0,),
    },
    f"{LOSS} router_jitter_noise shared_moe_mode",
)


def minimax_config(settings: Settings) -> ModelConfig:
    """Our configuration of a MiniMax."""
    model, layers = FIELDS.read(settings)
    n = fields.layer_count(settings)
    for ours, word in _FACTORS.items():
        found = {number(settings, f"{place}_{word}_factor", 1.0) for place in _PLACES}
        if len(found) > 1:
            raise InputError(f"the fields *_{word}_factor must be equal, got {sorted(found)}")
        (model[ours],) = found
    rotated = fields.head_width(settings)
    if settings.get("rotary_dim") not in (None, rotated):
        raise InputError(
            f"rotary_dim={settings['rotary_dim']!r:.20} is not read by transformers, which rotates "
            f"{rotated} entries of each head: for its function, leave it out with "
            "--settings '{\"rotary_dim\": null}'"
        )
    attention: dict[str, Any] = {**fields.heads(settings, 8), **fields.rope(settings, base=1e6)}
    lightning: dict[str, Any] = {
        name: attention[name] for name in ("n_heads", "d_head") if name in attention
    }
    layers |= {"attention": attention, "lightning_attention": lightning}
    types = fields.layer_types(settings, "layer_types", known=tuple(_WORDS))
    types = types or ["linear_attention" if i % 2 else "full_attention" for i in range(n)]
    mixers = [_WORDS[word] for word in types]
    # the decay of a head is slower in later layers
    scales = [1 - i / (n - 1 + 1e-5) + 1e-5 for i in range(n)]
    pattern = " ".join(
        f"{mixer}(decay_scale={scale})" if mixer == "lightning_attention" else mixer
        for mixer, scale in zip(mixers, scales, strict=True)
    )
    layers = {name: keywords for name, keywords in layers.items() if name in {*mixers, "moe"}}
    return ModelConfig(
        pattern, norm="rms", block="normed", feed_forward="moe", layers=layers, **model
    )


def minimax_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`minimax_config`."""
    blocks = groups(config, NAMES)
    heads = first_keywords(blocks, "attention")
    words = {ours: official for official, ours in _WORDS.items()}
    return {
        **FIELDS.write(config, blocks),
        "num_attention_heads": heads["n_heads"],
        "layer_types": [words[mixer.name] for mixer, _ in blocks],
        **{
            f"{place}_{word}_factor": getattr(config, ours)
            for ours, word in _FACTORS.items()
            for place in _PLACES
        },
    }


CONVERTERS = {
    "minimax": Converter(
        "MiniMax-01 of Hugging Face transformers",
        NAMES,
        minimax_config,
        minimax_settings,
        {"minimax": "MiniMaxForCausalLM"},
    )
}
"""By ``model_type``."""
