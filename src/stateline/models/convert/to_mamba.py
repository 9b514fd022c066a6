"""From our models to the formats of Mamba: the inverse of :mod:`stateline.models.convert.mamba`."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.base import LOW_PRECISION
from stateline.models.config import ModelConfig
from stateline.models.convert.mamba import EMBEDDING, family, layer_settings, official_names
from stateline.models.convert.weights import some_names
from stateline.models.pattern import Value


def mamba_tensors(
    tensors: Mapping[str, Tensor], config: ModelConfig, *, hugging_face: bool
) -> dict[str, Tensor]:
    """Official tensors from ours; the inverse of :func:`mamba_weights`.

    Args:
        tensors: By our names.
        config: What the model is made of.
        hugging_face: Names of Hugging Face, not of the official code.

    Raises:
        InputError: If a tensor of the model has no place there.
    """
    family(config)
    conv_bias = has_conv_bias(tensors)
    biases = {f"backbone.layers.{n}.mixer.conv1d.bias" for n in range(len(tensors))}
    names = official_names(config, biases if conv_bias else ())
    unused = set() if conv_bias else {name for name in tensors if name.endswith(".conv.bias")}
    if left_over := sorted(tensors.keys() - names.values() - unused):
        raise InputError(f"Mamba models have no place for {some_names(left_over)}")
    dtype = tensors["embedding.weight"].dtype
    official = {theirs: as_stored(tensors[ours], dtype) for theirs, ours in names.items()}
    for name in official:
        if name.endswith("conv1d.weight"):
            official[name] = official[name].flip(-1)[:, None].contiguous()
    if hugging_face:
        renamed = {official: other for other, official in EMBEDDING.items()}
        return {renamed.get(name, name): tensor for name, tensor in official.items()}
    return official | {
        "lm_head.weight": official.get("lm_head.weight", tensors["embedding.weight"])
    }


def mamba_settings(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, hugging_face: bool
) -> dict[str, Any]:
    """The ``config.json`` of our model; the inverse of :func:`mamba_config`.

    Raises:
        InputError: If it is no Mamba or Mamba-2.
    """
    kind, n_layers = family(config)
    layer = layer_settings(config, kind)
    if kind == "mamba2":
        n_heads = len(tensors["stack.layers.0.layer.a_log"])
        layer["d_head"] = int(config.d_model * float(layer["expand"] or 0)) // n_heads
    conv_bias = has_conv_bias(tensors)
    if hugging_face:
        return _hugging_face_settings(config, kind, n_layers, layer | {"conv_bias": conv_bias})
    if kind == "mamba" and layer["norm_eps"] is not None:
        raise InputError(
            "the official Mamba has no norms inside its layers (norm_eps): use the format mamba-hf"
        )
    return _official_settings(config, kind, n_layers, layer | {"conv_bias": conv_bias})


def has_conv_bias(tensors: Mapping[str, Tensor]) -> bool:
    """False if all biases of convolutions are zero: then the published model had none."""
    return any(bool(t.any()) for name, t in tensors.items() if name.endswith(".conv.bias"))


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In half precision, if the model is and nothing is lost: it was raised when it was read."""
    lower = tensor.to(dtype)
    exact = dtype in LOW_PRECISION and bool(lower.to(tensor.dtype).equal(tensor))
    return lower if exact else tensor


def _official_settings(
    config: ModelConfig, kind: str, n_layers: int, layer: Mapping[str, Value]
) -> dict[str, Any]:
    names = {"conv_bias": "conv_bias"}
    names |= {"d_state": "d_state", "d_conv": "d_conv", "expand": "expand", "bias": "bias"}
    names |= {"dt_rank": "dt_rank"} if kind == "mamba" else {"d_head": "headdim"}
    names |= {} if kind == "mamba" else {"n_groups": "ngroups"}
    ssm = {official: layer[ours] for ours, official in names.items() if layer[ours] is not None}
    return {
        "d_model": config.d_model,
        "n_layer": n_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": {"layer": "Mamba2" if kind == "mamba2" else "Mamba1"} | ssm,
        "rms_norm": config.norm == "rms",
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_embeddings,
    }


def _hugging_face_settings(
    config: ModelConfig, kind: str, n_layers: int, layer: Mapping[str, Value]
) -> dict[str, Any]:
    if config.norm != "rms":
        raise InputError("Mamba models of Hugging Face have norm='rms', got 'layer'")
    inner = int(config.d_model * float(layer["expand"] or 0))
    settings = {
        "architectures": ["MambaForCausalLM" if kind == "mamba" else "Mamba2ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": n_layers,
        "state_size": layer["d_state"],
        "conv_kernel": layer["d_conv"],
        "expand": _whole(layer["expand"]),
        "use_bias": layer["bias"],
        "use_conv_bias": layer["conv_bias"],
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": True,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if kind == "mamba":
        rank = layer["dt_rank"] or math.ceil(config.d_model / 16)
        settings |= {"time_step_rank": rank, "intermediate_size": inner}
        if layer["norm_eps"] is None:
            return settings
        falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
        return settings | falcon | {"mixer_rms_eps": layer["norm_eps"]}
    d_head = int(layer["d_head"] or 0)
    groups = {"head_dim": d_head, "num_heads": inner // d_head, "n_groups": layer["n_groups"]}
    return settings | groups


def _whole(value: Value) -> Value:
    """As an integer where it is one: transformers accepts no other type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
