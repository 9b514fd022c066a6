"""Mamba and Mamba-2, in the formats of the official code and of Hugging Face."""

import math
from collections.abc import Mapping
from typing import Any

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.convert import fields
from stateline.models.convert.converter import Converter
from stateline.models.convert.fields import Draft, Fields, Rule, Settings, field
from stateline.models.convert.parts import Names, Written, groups, inner_width, renamed
from stateline.models.convert.weights import count, section

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


def dt_rank(settings: Settings, name: str) -> int | None:
    """The rank of the steps; ``auto`` is the default of our layer."""
    return None if settings.get(name, "auto") == "auto" else count(settings, name)


def _layer(kind: str, bias: str, conv_bias: str, taps: str, state: str) -> tuple[Rule, ...]:
    """Fields that both kinds have in both formats, by the names of a format."""
    return fields.several(
        kind,
        f"expand:2.0 {bias}=bias:False {conv_bias}=conv_bias:True {taps}=d_conv:4 "
        f"{state}=d_state:{16 if kind == 'mamba' else 128}",
    )


def _rank(name: str) -> Rule:
    """The field with the rank of the steps of a Mamba."""
    return Rule(
        name,
        lambda draft: draft.put("mamba.dt_rank", dt_rank(draft.settings, name)),
        lambda model: {name: model.first("mamba")["dt_rank"]},
    )


def _read_width(draft: Draft) -> None:
    if draft.settings.get("intermediate_size") is not None:  # transformers then ignores expand
        inner = count(draft.settings, "intermediate_size")
        draft.put("mamba.expand", inner / draft.model["d_model"])


def _write_width(model: Written) -> dict[str, Any]:
    mamba = model.first("mamba")
    # transformers takes an integer as expand, and does not read it beside the width
    expand = math.ceil(mamba["expand"])
    return {"intermediate_size": inner_width(mamba, model.config), "expand": expand}


def _read_heads(draft: Draft) -> None:
    layer = draft.layers["mamba2"]
    unlimited(draft.settings, "time_step_limit")
    inner = count(draft.settings, "num_heads", 128) * layer["d_head"]
    if int(layer["expand"] * draft.model["d_model"]) != inner:
        raise InputError(
            f"num_heads * head_dim must be expand * hidden_size, got {inner} and expand="
            f"{layer['expand']:g}"
        )


def _write_heads(model: Written) -> dict[str, Any]:
    layer = model.first("mamba2")
    if not float(layer["expand"]).is_integer():
        raise InputError(
            "Mamba-2 models of Hugging Face have an integer as expand, got "
            f"{layer['expand']:g}: use the format mamba"
        )
    n_heads = inner_width(layer, model.config) // layer["d_head"]
    return {"num_heads": n_heads, "expand": int(layer["expand"])}


_MODEL = (
    field("layer_norm_epsilon", "norm_eps", 1e-5),
    # no effect here: our residual stream has the precision of the weights
    Rule("residual_in_fp32", lambda _: None, lambda _: {"residual_in_fp32": True}),
)
_LAYER = ("use_bias", "use_conv_bias", "conv_kernel", "state_size")
# transformers 5 rescales also weights that it has read
_ONLY = {"hidden_act": ("silu", "swish"), "rescale_prenorm_residual": (False,)}
_INERT = (
    "d_inner d_model fused_add_norm n_layer pad_vocab_size_multiple rms_norm ssm_cfg "  # official
    "chunk_size time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale "
    "use_associative_scan use_falcon_mambapy use_mambapy"
)
_MAMBA = (
    *fields.TIED,
    *_MODEL,
    *_layer("mamba", *_LAYER),
    _rank("time_step_rank"),
    Rule("intermediate_size", _read_width, _write_width),
)
_MAMBA2 = (
    *fields.ENDS,
    *_MODEL,
    *_layer("mamba2", *_LAYER),
    *fields.several("mamba2", "head_dim=d_head:64 n_groups:8 layer_norm_epsilon=norm_eps:1e-5"),
    Rule("time_step_limit num_heads", _read_heads, _write_heads),
)
_FIELDS = {
    "mamba": Fields(_MAMBA, _ONLY, _INERT),
    "falcon_mamba": Fields(
        (*_MAMBA, field("mixer_rms_eps", "mamba.norm_eps", 1e-6)), _ONLY, _INERT
    ),
    "mamba2": Fields(_MAMBA2, _ONLY, f"{_INERT} intermediate_size norm_before_gate time_step_rank"),
}
"""By ``model_type``."""

_OFFICIAL_MODEL = Fields(
    (
        fields.VOCABULARY,
        field("d_model", "d_model"),
        field("tie_embeddings", "tie_embeddings", True),
        field("rms_norm", "norm", True, {True: "rms", False: "layer"}),
        Rule("ssm_cfg pad_vocab_size_multiple", lambda _: None),
    ),
    {"attn_layer_idx": ([],), "attn_cfg": ({},), "d_intermediate": (0,)},
    "fused_add_norm residual_in_fp32",
    depth="n_layer",
)
_INITIAL = "layer dt_init dt_init_floor dt_max dt_min dt_scale use_fast_path use_mem_eff_path"
_SSM = ("bias", "conv_bias", "d_conv", "d_state")
_OFFICIAL = {
    "mamba": Fields((*_layer("mamba", *_SSM), _rank("dt_rank")), inert=_INITIAL, depth=""),
    "mamba2": Fields(
        (
            *_layer("mamba2", *_SSM),
            *fields.several("mamba2", "headdim=d_head:64 ngroups=n_groups:1"),
            Rule("dt_limit", lambda draft: unlimited(draft.settings, "dt_limit")),
        ),
        {
            "norm_before_gate": (False,),
            "D_has_hdim": (False,),
            "rmsnorm": (True,),
            "d_ssm": (None,),
        },
        f"{_INITIAL} A_init_range chunk_size conv_init",
        depth="",
    ),
}
"""Fields of ``ssm_cfg``."""


def mamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Mamba, Mamba-2 or Falcon-Mamba of Hugging Face.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    References:
        Gu and Dao, "Mamba", 2023; Dao and Gu, "Transformers are SSMs", 2024.
    """
    kind = str(settings["model_type"])
    names = NAMES._replace(mixers=("mamba2" if kind == "mamba2" else "mamba",))
    return _FIELDS[kind].config(settings, names)


def official_mamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Mamba or Mamba-2 of state-spaces/mamba.

    Args:
        settings: As in its ``config.json``. The vocabulary is padded to a multiple, as there.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = official_mamba_config(
        ...     {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {}})
        >>> config.pattern, config.vocab_size, config.norm
        ('mamba*2', 64, 'rms')
    """
    model = _OFFICIAL_MODEL.read(settings).model
    ssm = section(settings, "ssm_cfg")
    if (version := ssm.get("layer", "Mamba1")) not in ("Mamba1", "Mamba2"):
        raise InputError(f"the settings must have layer='Mamba1' or 'Mamba2', got {version!r}")
    kind = "mamba2" if version == "Mamba2" else "mamba"
    multiple = count(settings, "pad_vocab_size_multiple", 8)
    return ModelConfig(
        f"{kind}*{fields.layer_count(settings, 'n_layer')}",
        layers=dict(_OFFICIAL[kind].read(ssm).layers),
        **model | {"vocab_size": math.ceil(model["vocab_size"] / multiple) * multiple},
    )


def mamba_settings(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`mamba_config`."""
    model = groups(config, NAMES)
    mixer = model.blocks[0][0]
    if config.norm != "rms":
        raise InputError("Mamba models of Hugging Face have norm='rms', got 'layer'")
    inside = mixer.name == "mamba" and mixer.keywords["norm_eps"] is not None
    kind = "falcon_mamba" if inside else mixer.name
    return {"model_type": kind, **_FIELDS[kind].write(model)}


def official_mamba_settings(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`official_mamba_config`."""
    model = groups(config, NAMES)
    mixer = model.blocks[0][0]
    if mixer.name == "mamba" and mixer.keywords["norm_eps"] is not None:
        raise InputError(
            "the official Mamba has no norms inside its layers (norm_eps): use the format mamba-hf"
        )
    version = {"layer": "Mamba2" if mixer.name == "mamba2" else "Mamba1"}
    return {
        **_OFFICIAL_MODEL.write(model),
        "ssm_cfg": version | _OFFICIAL[mixer.name].write(model),
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
    }


CONVERTERS = {
    "mamba": Converter(
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
