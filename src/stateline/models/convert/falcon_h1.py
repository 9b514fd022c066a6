"""Falcon-H1: attention beside Mamba-2 in each block, with fixed factors of many maps."""

import math
from collections.abc import Callable
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.decoders import GATED, NORM, SILU
from stateline.models.convert.decoders import NAMES as DECODER
from stateline.models.convert.mamba import unlimited
from stateline.models.convert.parts import first_keywords, groups, inner_width
from stateline.models.convert.weights import count, flag, number

NAMES = DECODER._replace(
    mixers=("parallel",),
    norm="model.final_layernorm",
    norms=("input_layernorm", "pre_ff_layernorm"),
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    inner="mamba.",
)
_EPS = NORM._replace(default=1e-5)
_SSM = ("gate_scale", "input_scale", "b_scale", "c_scale", "step_scale")
FIELDS = fields.Fields(
    (
        *GATED,
        _EPS,
        _EPS._replace(ours="mamba2.norm_eps"),
        fields.Field("mamba_d_state", "mamba2.d_state", 256),
        fields.Field("mamba_n_groups", "mamba2.n_groups", 1),
        fields.Field("mamba_d_conv", "mamba2.d_conv", 4),
        fields.Field("mamba_conv_bias", "mamba2.conv_bias", True),
        fields.Field("mamba_rms_norm", "mamba2.normalise", False),
        fields.Field("ssm_out_multiplier", "mamba2.out_scale", 1.0),
        fields.Field("embedding_multiplier", "embedding_multiplier", 1.0),
    ),
    f"{fields.HEADS} {fields.ROPE} attention_in_multiplier attention_out_multiplier key_multiplier "
    "lm_head_multiplier mamba_d_head mamba_d_ssm mamba_expand mamba_n_heads mamba_norm_before_gate "
    "mlp_multipliers ssm_in_multiplier ssm_multipliers time_step_limit",
    {
        **SILU,
        "attention_bias": (False,),
        "mamba_proj_bias": (False,),
        "mlp_bias": (False,),
        "projectors_bias": (False,),
    },
    "mamba_chunk_size mamba_use_mlp",
)


def falcon_h1_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Falcon-H1."""
    model, layers = FIELDS.read(settings)
    unlimited(settings, "time_step_limit")
    mamba2 = layers["mamba2"]
    if mamba2["normalise"] and flag(settings, "mamba_norm_before_gate", True):
        raise InputError("mamba_norm_before_gate must be false where mamba_rms_norm is true")
    inner = count(settings, "mamba_expand", 2) * model["d_model"]
    if settings.get("mamba_d_ssm", 1024) is not None:
        inner = count(settings, "mamba_d_ssm", 1024)
    n_heads = count(settings, "mamba_n_heads", 128)
    given = settings.get("mamba_d_head", "auto")
    if inner % n_heads or given not in ("auto", inner // n_heads):
        raise InputError(
            f"mamba_n_heads * mamba_d_head must be mamba_d_ssm, {inner}, got {n_heads} * "
            f"{given!r:.20}"
        )
    mamba2 |= {"expand": inner / model["d_model"], "d_head": inner // n_heads}
    factor = number(settings, "ssm_in_multiplier", 1.0)
    ssm = _numbers(settings, "ssm_multipliers", len(_SSM))
    mamba2 |= {name: factor * own for name, own in zip(_SSM, ssm, strict=True)}
    gate, down = _numbers(settings, "mlp_multipliers", 2)
    layers["feed_forward"] |= {"gate_scale": gate, "out_scale": down}
    # the input's factor multiplies queries, keys and values
    before = number(settings, "attention_in_multiplier", 1.0)
    usual = _usual(fields.head_width(settings))
    scale = number(settings, "key_multiplier", 1.0) * before * before * usual
    layers["attention"] = {
        **fields.heads(settings, 8),
        **fields.rope(settings),
        "out_scale": before * number(settings, "attention_out_multiplier", 1.0),
        "score_scale": None if scale == usual else scale,
    }
    after = number(settings, "lm_head_multiplier", 1.0)
    if not 0 < after < math.inf:
        raise InputError(f"lm_head_multiplier must be positive, got {after}")
    blocks = fields.runs(["parallel(mamba2, attention)"] * fields.layer_count(settings))
    return ModelConfig(
        blocks,
        norm="rms",
        feed_forward="swiglu",
        logits_divisor=1 / after,
        layers=layers,
        **model,
    )


def _usual(d_head: int) -> float:
    return float(max(1, d_head) ** -0.5)


def _numbers(settings: Settings, name: str, n: int) -> list[float]:
    """A list of n factors, which are 1 if it is missing."""
    found = settings.get(name)
    if found is None:
        return [1.0] * n
    if not isinstance(found, list) or len(found) != n:
        raise InputError(f"{name} must be {n} numbers, got {found!r:.80}")
    return [number({name: value}, name, 1.0) for value in found]


def falcon_h1_settings(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`falcon_h1_config`."""
    blocks = groups(config, NAMES)
    mamba2, attention = (first_keywords(blocks, name) for name in ("mamba2", "attention"))
    feed_forward = first_keywords(blocks, "feed_forward")
    inner, usual = inner_width(mamba2, config), _usual(attention["d_head"])
    scale, divisor = attention["score_scale"] or usual, config.logits_divisor
    return {
        **FIELDS.write(config, blocks),
        "attention_out_multiplier": attention["out_scale"],
        "key_multiplier": _solved(lambda key: key * usual, scale / usual, scale),
        "lm_head_multiplier": _solved(lambda after: 1 / after, 1 / divisor, divisor),
        "mamba_d_head": mamba2["d_head"],
        "mamba_d_ssm": inner,
        "mamba_n_heads": inner // mamba2["d_head"],
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [feed_forward["gate_scale"], feed_forward["out_scale"]],
        "ssm_multipliers": [mamba2[name] for name in _SSM],
    }


def _solved(function: Callable[[float], float], guess: float, wanted: float) -> float:
    """The number at the guess, or next to it, of which the function is exactly as wanted."""
    near = [guess]
    for towards in (0.0, math.inf):
        close = [guess]
        for _ in range(3):
            close.append(math.nextafter(close[-1], towards))
        near += close
    return next((number for number in near if function(number) == wanted), guess)


CONVERTERS = {
    "falcon_h1": Converter(
        "Falcon-H1 of Hugging Face transformers",
        NAMES,
        falcon_h1_config,
        falcon_h1_settings,
        {"falcon_h1": "FalconH1ForCausalLM"},
    )
}
"""By ``model_type``."""
