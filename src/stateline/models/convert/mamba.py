"""Mamba and Mamba-2, in the formats of the official code and of Hugging Face."""

import math
from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter, Settings
from stateline.models.convert.parts import (
    Names,
    first_keywords,
    groups,
    inner_width,
    renamed,
)
from stateline.models.convert.weights import count, flag, section

NAMES = Names(
    embedding="backbone.embeddings",
    mixers=("mamba", "mamba2"),
    base="backbone.",
    norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    norms=("norm",),
    inner="mixer.",
    spell=renamed("backbone.embedding.weight", "backbone.embeddings.weight"),
)
OFFICIAL_NAMES = NAMES._replace(
    embedding="backbone.embedding",
    writes_tied_head=True,
    spell=renamed("backbone.embeddings.weight", "backbone.embedding.weight"),
)

_EPS = fields.Field("layer_norm_epsilon", "norm_eps", 1e-5)


def _layer_fields(
    kind: str, bias: str, conv_bias: str, taps: str, state: str
) -> tuple[fields.Field, ...]:
    """Fields that both kinds have in both formats, by the names of a format."""
    return (
        fields.Field("expand", f"{kind}.expand", 2.0),
        fields.Field(bias, f"{kind}.bias", False),
        fields.Field(conv_bias, f"{kind}.conv_bias", True),
        fields.Field(taps, f"{kind}.d_conv", 4),
        fields.Field(state, f"{kind}.d_state", 16 if kind == "mamba" else 128),
    )


_MODEL = (fields.VOCABULARY, fields.WIDTH, _EPS)
_LAYER = ("use_bias", "use_conv_bias", "conv_kernel", "state_size")
# transformers 5 rescales also weights that it has read
_ONLY = {"hidden_act": ("silu", "swish"), "rescale_prenorm_residual": (False,)}
_READS = "time_step_rank intermediate_size"
_INERT = (
    "d_inner d_model fused_add_norm n_layer pad_vocab_size_multiple rms_norm ssm_cfg "  # official
    "chunk_size residual_in_fp32 time_step_floor time_step_init_scheme "
    "time_step_max time_step_min time_step_scale use_associative_scan use_falcon_mambapy "
    "use_mambapy"
)
_MAMBA = (*_MODEL, fields.TIED._replace(default=True), *_layer_fields("mamba", *_LAYER))
FIELDS = {
    "mamba": fields.Fields(_MAMBA, _READS, _ONLY, _INERT),
    "falcon_mamba": fields.Fields(
        (*_MAMBA, fields.Field("mixer_rms_eps", "mamba.norm_eps", 1e-6)), _READS, _ONLY, _INERT
    ),
    "mamba2": fields.Fields(
        (
            *_MODEL,
            fields.TIED,
            *_layer_fields("mamba2", *_LAYER),
            fields.Field("head_dim", "mamba2.d_head", 64),
            fields.Field("n_groups", "mamba2.n_groups", 8),
            _EPS._replace(ours="mamba2.norm_eps"),
        ),
        "time_step_limit num_heads",
        _ONLY,
        f"{_INERT} intermediate_size norm_before_gate time_step_rank",
    ),
}
"""By ``model_type``."""

_OFFICIAL_MODEL = fields.Fields(
    (
        fields.VOCABULARY,
        fields.Field("d_model", "d_model"),
        fields.Field("tie_embeddings", "tie_embeddings", True),
    ),
    "ssm_cfg rms_norm pad_vocab_size_multiple",
    {"attn_layer_idx": ([],), "attn_cfg": ({},), "d_intermediate": (0,)},
    "fused_add_norm residual_in_fp32",
    "n_layer",
)
_INITIAL = "dt_init dt_init_floor dt_max dt_min dt_scale use_fast_path use_mem_eff_path"
_SSM = ("bias", "conv_bias", "d_conv", "d_state")
_OFFICIAL = {
    "mamba": fields.Fields(
        _layer_fields("mamba", *_SSM), "layer dt_rank", inert=_INITIAL, depth=""
    ),
    "mamba2": fields.Fields(
        (
            *_layer_fields("mamba2", *_SSM),
            fields.Field("headdim", "mamba2.d_head", 64),
            fields.Field("ngroups", "mamba2.n_groups", 1),
        ),
        "layer dt_limit",
        {
            "norm_before_gate": (False,),
            "D_has_hdim": (False,),
            "rmsnorm": (True,),
            "d_ssm": (None,),
        },
        f"{_INITIAL} A_init_range chunk_size conv_init",
        "",
    ),
}
"""Fields of ``ssm_cfg``."""


def mamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Mamba, Mamba-2 or Falcon-Mamba of Hugging Face.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it. ``residual_in_fp32`` has no effect: our residual stream has the
            precision of the weights.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    References:
        Gu and Dao, "Mamba", 2023; Dao and Gu, "Transformers are SSMs", 2024.
    """
    kind = str(settings["model_type"])
    model, layers = FIELDS[kind].read(settings)
    (name,) = layers
    if kind == "mamba2":
        unlimited(settings, "time_step_limit")
        inner = count(settings, "num_heads", 128) * layers[name]["d_head"]
        if int(layers[name]["expand"] * model["d_model"]) != inner:
            raise InputError(
                f"num_heads * head_dim must be expand * hidden_size, got {inner} and expand="
                f"{layers[name]['expand']:g}"
            )
    else:
        layers[name]["dt_rank"] = dt_rank(settings, "time_step_rank")
        if settings.get("intermediate_size") is not None:  # transformers then ignores expand
            inner = count(settings, "intermediate_size")
            layers[name]["expand"] = inner / model["d_model"]
    return ModelConfig(f"{name}*{fields.layer_count(settings)}", norm="rms", layers=layers, **model)


def official_mamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Mamba or Mamba-2 of state-spaces/mamba.

    Args:
        settings: As in its ``config.json``. The vocabulary is padded to a multiple, as there.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = official_mamba_config(
        ...     {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {}})
        >>> config.pattern, config.vocab_size, config.norm
        ('mamba*2', 64, 'rms')
    """
    model, _ = _OFFICIAL_MODEL.read(settings)
    ssm = section(settings, "ssm_cfg")
    if (version := ssm.get("layer", "Mamba1")) not in ("Mamba1", "Mamba2"):
        raise InputError(f"the settings must have layer='Mamba1' or 'Mamba2', got {version!r}")
    kind = "mamba2" if version == "Mamba2" else "mamba"
    _, layers = _OFFICIAL[kind].read(ssm)
    if kind == "mamba2":
        unlimited(ssm, "dt_limit")
    else:
        layers["mamba"]["dt_rank"] = dt_rank(ssm, "dt_rank")
    multiple = count(settings, "pad_vocab_size_multiple", 8)
    return ModelConfig(
        f"{kind}*{fields.layer_count(settings, 'n_layer')}",
        norm="rms" if flag(settings, "rms_norm", True) else "layer",
        layers=layers,
        **model | {"vocab_size": math.ceil(model["vocab_size"] / multiple) * multiple},
    )


def dt_rank(settings: Settings, name: str) -> int | None:
    """The rank of the steps; ``auto`` is the default of our layer."""
    return None if settings.get(name, "auto") == "auto" else count(settings, name)


def mamba_settings(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`mamba_config`."""
    blocks = groups(config, NAMES)
    kind = blocks[0][0].name
    layer = first_keywords(blocks, kind)
    if config.norm != "rms":
        raise InputError("Mamba models of Hugging Face have norm='rms', got 'layer'")
    inner = inner_width(layer, config)
    if kind == "mamba":
        kind = "mamba" if layer["norm_eps"] is None else "falcon_mamba"
        own = {"time_step_rank": layer["dt_rank"], "intermediate_size": inner}
    else:
        own = {"num_heads": inner // layer["d_head"]}
    settings = {"model_type": kind, **FIELDS[kind].write(config, blocks), **own}
    return settings | {"expand": _whole(settings["expand"]), "residual_in_fp32": True}


def official_mamba_settings(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`official_mamba_config`."""
    blocks = groups(config, NAMES)
    kind = blocks[0][0].name
    layer = first_keywords(blocks, kind)
    if kind == "mamba" and layer["norm_eps"] is not None:
        raise InputError(
            "the official Mamba has no norms inside its layers (norm_eps): use the format mamba-hf"
        )
    rank = {"dt_rank": layer["dt_rank"]} if kind == "mamba" else {}
    version = {"layer": "Mamba2" if kind == "mamba2" else "Mamba1"}
    return {
        **_OFFICIAL_MODEL.write(config, blocks),
        "ssm_cfg": version | rank | _OFFICIAL[kind].write(config, blocks),
        "rms_norm": config.norm == "rms",
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
    }


def unlimited(settings: Settings, name: str) -> None:
    """Check that step sizes are not limited; new versions of transformers encode infinity."""
    given = settings.get(name) or (0.0, math.inf)
    try:
        limits = [_float(limit) for limit in given]
    except (LookupError, TypeError, ValueError):
        limits = []
    if limits != [0.0, math.inf]:
        raise InputError(f"limited step sizes are not supported, got {name}={given}")


def _float(value: Any) -> float:
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def _whole(value: float) -> float:
    """As an integer where it is one: transformers accepts no other type."""
    return int(value) if float(value).is_integer() else value


CONVERTERS = {
    "mamba": Converter(
        "Mamba and Mamba-2 of state-spaces/mamba",
        OFFICIAL_NAMES,
        official_mamba_config,
        official_mamba_settings,
        recognise=lambda settings, tensors: (
            "ssm_cfg" in settings
            and "model_type" not in settings
            and any(name.endswith("mixer.A_log") for name in tensors)
        ),
        file="pytorch_model.bin",
    ),
    "mamba-hf": Converter(
        "Mamba, Mamba-2 and Falcon-Mamba of Hugging Face transformers",
        NAMES,
        mamba_config,
        mamba_settings,
        {
            "mamba": "MambaForCausalLM",
            "mamba2": "Mamba2ForCausalLM",
            "falcon_mamba": "FalconMambaForCausalLM",
        },
    ),
}
"""By name of the format."""
