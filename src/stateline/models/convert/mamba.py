"""Mamba and Mamba-2, in the formats of the official code and of Hugging Face."""

import inspect
import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import (
    assemble,
    count,
    number,
    read_settings,
    read_weights,
    rename,
    section,
)
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import Value, parse_pattern

Settings = Mapping[str, Any]


def load_mamba(
    source: str | Path | Mapping[str, Tensor],
    settings: Settings | None = None,
    *,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Read a published Mamba or Mamba-2, of the official code or of Hugging Face.

    Args:
        source: Its folder, with ``config.json`` and the weights (in safetensors, or pickled, of
            which only tensors are read), or its state dict.
        settings: As in its ``config.json``; for a state dict.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode, in the precision in which it was saved; the parameters of
        state space models are at least float32. Where the official vocabulary is padded to a
        multiple, so is ours.

    Raises:
        InputError: If a file is missing or damaged, tensors are missing, left over or of another
            shape, or the configuration asks for what is not there.

    References:
        Gu and Dao, "Mamba", 2023; Dao and Gu, "Transformers are SSMs", 2024; state-spaces/mamba.
    """
    if isinstance(source, Mapping):
        tensors, found = source, settings
    else:
        tensors, found = read_weights(source), settings or read_settings(source)
    if found is None:
        raise InputError("a state dict comes without its settings: pass those of its config.json")
    return assemble(mamba_config(found), mamba_weights(tensors, found), device=device)


def mamba_config(settings: Settings) -> ModelConfig:
    """Our configuration of a Mamba or Mamba-2.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that its
            library gives it. ``residual_in_fp32`` has no effect: our residual stream has the
            precision of the weights.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = mamba_config({"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {}})
        >>> config.pattern, config.vocab_size, config.norm
        ('mamba*2', 64, 'rms')
    """
    return _official(settings) if "ssm_cfg" in settings else _hugging_face(settings)


def mamba_weights(tensors: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Our tensors from those of a Mamba or Mamba-2.

    Args:
        tensors: By official names.
        settings: As for :func:`mamba_config`.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over, or the output map of a model that ties it
            is not its embedding.
    """
    config = mamba_config(settings)
    official = {EMBEDDING.get(name, name): tensor for name, tensor in tensors.items()}
    head, embedding = official.get("lm_head.weight"), official.get("backbone.embedding.weight")
    if config.tie_embeddings and head is not None and embedding is not None:
        if not torch.equal(head, embedding):
            raise InputError(
                "lm_head.weight must be the embedding where the configuration ties them, got "
                "another: set tie_embeddings (or tie_word_embeddings) to false in the settings"
            )
        del official["lm_head.weight"]
    ours = rename(official, official_names(config, official))
    for name, kernel in list(ours.items()):
        if name.endswith(".conv.kernel"):
            ours[name] = kernel[:, 0].flip(-1)  # official kernels begin with the oldest input
            # Our layer always has this bias; it is zero if the published model has none.
            ours.setdefault(name.replace("kernel", "bias"), torch.zeros_like(kernel[:, 0, 0]))
    return ours


def family(config: ModelConfig) -> tuple[str, int]:
    """Kind and number of the layers; InputError if they are not all of one kind."""
    item, *others = parse_pattern(config.pattern)
    uniform = not others and item.name in _MIXER and not item.keywords
    if not uniform or config.norm == "none" or config.block != "sequential" or config.head_bias:
        raise InputError(
            "Mamba models consist of mamba or mamba2 layers alone, whose keywords are set for all, "
            f"got {config.pattern!r}"
        )
    return item.name, item.repeat


def layer_settings(config: ModelConfig, kind: str) -> dict[str, Value]:
    """Keywords of a layer, defaults included."""
    parameters = inspect.signature(LAYERS[kind]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {**defaults, **config.layers.get(kind, {})}


EMBEDDING = {"backbone.embeddings.weight": "backbone.embedding.weight"}
"""Hugging Face's name, and the official one."""

_MIXER = {
    "mamba": {
        "x_proj.weight": "x_proj.weight",
        "dt_proj.weight": "dt_weight",
        "dt_proj.bias": "dt_bias",
    },
    "mamba2": {"dt_bias": "dt_bias", "norm.weight": "norm_weight"},
}
"""Our name of each tensor that only one of the kinds has."""

_BOTH = {
    "A_log": "a_log",
    "D": "skip",
    "in_proj.weight": "in_proj.weight",
    "conv1d.weight": "conv.kernel",
    "out_proj.weight": "out_proj.weight",
}
_BIASES = {"in_proj.bias": "in_proj.bias", "out_proj.bias": "out_proj.bias"}


def official_names(config: ModelConfig, tensors: Container[str]) -> dict[str, str]:
    """Our name of each official one."""
    names = {"backbone.embedding.weight": "embedding.weight"}
    if not config.tie_embeddings:
        names["lm_head.weight"] = "head.weight"
    norms = {"weight"} if config.norm == "rms" else {"weight", "bias"}
    names |= {f"backbone.norm_f.{part}": f"norm.{part}" for part in norms}
    kind, n_layers = family(config)
    mixer = _BOTH | _MIXER[kind] | (_BIASES if layer_settings(config, kind)["bias"] else {})
    for layer in range(n_layers):
        there, here = f"backbone.layers.{layer}.", f"stack.layers.{layer}."
        names |= {f"{there}norm.{part}": f"{here}norm.{part}" for part in norms}
        names |= {f"{there}mixer.{name}": f"{here}layer.{ours}" for name, ours in mixer.items()}
        if f"{there}mixer.conv1d.bias" in tensors:
            names[f"{there}mixer.conv1d.bias"] = f"{here}layer.conv.bias"
    return names


def _hugging_face(settings: Settings) -> ModelConfig:
    """Of a configuration of transformers."""
    falcon = settings.get("model_type") == "falcon_mamba"
    kind = "mamba" if falcon else settings.get("model_type")
    if kind not in list(_MIXER):
        raise InputError(f"the settings are of a {kind!r} model, not of a 'mamba' or 'mamba2'")
    _only(settings, "hidden_act", "silu", "swish")
    eps = number(settings, "layer_norm_epsilon", 1e-5)
    layer: dict[str, Value] = {
        "d_conv": count(settings, "conv_kernel", 4),
        "expand": number(settings, "expand", 2.0),
        "bias": settings.get("use_bias", False),
    }
    if kind == "mamba":
        layer |= {"d_state": count(settings, "state_size", 16), "dt_rank": _rank(settings)}
        layer |= {"norm_eps": number(settings, "mixer_rms_eps", 1e-6)} if falcon else {}
    else:
        unlimited(settings, "time_step_limit")
        layer |= {
            "d_state": count(settings, "state_size", 128),
            "d_head": count(settings, "head_dim", 64),
            "n_groups": count(settings, "n_groups", 8),
            "norm_eps": eps,
        }
    return ModelConfig(
        f"{kind}*{count(settings, 'num_hidden_layers')}",
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "hidden_size"),
        norm="rms",
        norm_eps=eps,
        tie_embeddings=settings.get("tie_word_embeddings", kind == "mamba"),
        layers={kind: layer},
    )


def _official(settings: Settings) -> ModelConfig:
    """Of a configuration of the official code."""
    for name in ("attn_layer_idx", "d_intermediate"):
        if settings.get(name):
            raise InputError(
                f"models with attention or feed-forwards between the layers are not supported, got "
                f"{name}={settings[name]}"
            )
    ssm = section(settings, "ssm_cfg")
    _only(settings, "rms_norm", True, False)
    _only(ssm, "layer", "Mamba1", "Mamba2")
    kind = "mamba2" if ssm.get("layer") == "Mamba2" else "mamba"
    layer: dict[str, Value] = {
        "d_conv": count(ssm, "d_conv", 4),
        "expand": number(ssm, "expand", 2.0),
        "bias": ssm.get("bias", False),
    }
    if kind == "mamba":
        layer |= {"d_state": count(ssm, "d_state", 16), "dt_rank": _rank(ssm, "dt_rank")}
    else:
        unlimited(ssm, "dt_limit")
        for name, value in (("norm_before_gate", False), ("D_has_hdim", False), ("rmsnorm", True)):
            _only(ssm, name, value)
        _only(ssm, "d_ssm", None)
        layer |= {
            "d_state": count(ssm, "d_state", 128),
            "d_head": count(ssm, "headdim", 64),
            "n_groups": count(ssm, "ngroups", 1),
        }
    multiple = count(settings, "pad_vocab_size_multiple", 8)
    return ModelConfig(
        f"{kind}*{count(settings, 'n_layer')}",
        vocab_size=math.ceil(count(settings, "vocab_size") / multiple) * multiple,
        d_model=count(settings, "d_model"),
        norm="rms" if settings.get("rms_norm", True) else "layer",
        tie_embeddings=settings.get("tie_embeddings", True),
        layers={kind: layer},
    )


def _rank(settings: Settings, name: str = "time_step_rank") -> int | None:
    """``auto`` is the default of our layer."""
    return None if settings.get(name, "auto") == "auto" else count(settings, name)


def _only(settings: Settings, name: str, *known: Value) -> None:
    """Check that a setting has a known value; the first of them is the default."""
    if (value := settings.get(name, known[0])) not in known:
        words = " or ".join(repr(word) for word in known)
        raise InputError(f"the settings must have {name}={words}, got {value!r}")


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
