"""GPT-NeoX, and so Pythia, in the format of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import (
    BUFFERS,
    assemble,
    count,
    number,
    read_settings,
    read_weights,
    rename,
    section,
    some_names,
)
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import parse_pattern

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}
"""Our name of each official activation."""


def load_gpt_neox(folder: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """Read a published GPT-NeoX model, for example a Pythia, from its folder.

    Files of old and new versions of transformers are read, in safetensors or pickled, of which only
    tensors are read. The model has no ``max_len``: longer inputs than in training are accepted, and
    quality depends on how rotary positions extrapolate.

    Args:
        folder: With ``config.json`` and the weights.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode, in the precision in which it was saved.

    Raises:
        InputError: If a file is missing or damaged, tensors are missing, left over or of another
            shape, or the configuration asks for what is not there.

    References:
        Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023.
    """
    settings = read_settings(folder)
    if settings.get("model_type") != "gpt_neox":
        raise InputError(f"{folder} holds a {settings.get('model_type')!r} model, not a 'gpt_neox'")
    config = gpt_neox_config(settings)
    return assemble(config, gpt_neox_weights(read_weights(folder), settings), device=device)


def gpt_neox_config(settings: Mapping[str, Any], *, rotary: bool = True) -> ModelConfig:
    """Our configuration of a GPT-NeoX model.

    Args:
        settings: As in its ``config.json``; what may be missing there has the value that
            transformers gives it.
        rotary: Whether the model has rotary positions. If not, the caller adds the position scheme,
            and settings of rotary positions are ignored.

    Returns:
        The configuration.

    Raises:
        InputError: If a setting is missing, or one that is there has no counterpart.

    Example:
        >>> config = gpt_neox_config({
        ...     "vocab_size": 64, "hidden_size": 32, "intermediate_size": 128,
        ...     "num_hidden_layers": 2, "num_attention_heads": 4})
        >>> config.pattern, config.block, config.layers["attention"]["rotary_fraction"]
        ('attention*2', 'parallel', 0.25)
    """
    activation = str(settings.get("hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    attention = {
        "n_heads": count(settings, "num_attention_heads"),
        "bias": settings.get("attention_bias", True),
    }
    if rotary:
        attention |= _rotary(settings, attention["n_heads"])
    return ModelConfig(
        f"attention*{count(settings, 'num_hidden_layers')}",
        vocab_size=count(settings, "vocab_size"),
        d_model=count(settings, "hidden_size"),
        block="parallel" if settings.get("use_parallel_residual", True) else "sequential",
        norm_eps=number(settings, "layer_norm_eps", 1e-5),
        feed_forward=ACTIVATIONS[activation],  # type: ignore[arg-type]  # one of its words
        tie_embeddings=settings.get("tie_word_embeddings", False),
        layers={
            "attention": attention,
            "feed_forward": {"d_hidden": count(settings, "intermediate_size")},
        },
    )


def _rotary(settings: Mapping[str, Any], n_heads: int) -> dict[str, Any]:
    """Settings of rotary positions."""
    rope = {
        "partial_rotary_factor": number(settings, "rotary_pct", 0.25),  # older versions
        "rope_theta": number(settings, "rotary_emb_base", 10_000.0),
        **section(settings, "rope_parameters"),
    }
    if settings.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise InputError(
            "rescaled rotary positions are not supported, got "
            f"{settings.get('rope_scaling') or rope}: use a model without rope_scaling"
        )
    fraction = number(rope, "partial_rotary_factor", 0.25)
    entries = int(count(settings, "hidden_size") // n_heads * fraction)
    if entries % 2:
        raise InputError(
            f"rotary positions rotate pairs of entries, got {entries} entries per head "
            f"(hidden_size // num_attention_heads * {fraction}): models with an odd number are not "
            "supported"
        )
    return {
        "position": "rope",
        "rotary_fraction": fraction,
        "rope_base": number(rope, "rope_theta", 10_000.0),
    }


def gpt_neox_weights(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Our tensors from those of a GPT-NeoX model.

    Args:
        tensors: By official names; the output map may be called ``embed_out`` or ``lm_head``.
        settings: As for :func:`gpt_neox_config`.

    Returns:
        By our names.

    Raises:
        InputError: If tensors are missing or left over.
    """
    official = {_HEAD.get(name, name): tensor for name, tensor in tensors.items()}
    names = _names(settings)
    if "embed_out.weight" not in names:
        official.pop("embed_out.weight", None)  # a copy of the embedding
    ours = rename(official, names, ignored=BUFFERS)
    n_heads = count(settings, "num_attention_heads")
    return {
        name: _queries_first(tensor, n_heads) if ".qkv." in name else tensor
        for name, tensor in ours.items()
    }


def gpt_neox_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Official tensors from ours; the inverse of :func:`gpt_neox_weights`.

    Raises:
        InputError: If a tensor of the model has no place in a GPT-NeoX model.
    """
    settings = gpt_neox_settings(config, rotary=False)
    names, n_heads = _names(settings), count(settings, "num_attention_heads")
    if left_over := sorted(tensors.keys() - names.values()):
        raise InputError(f"GPT-NeoX models have no place for {some_names(left_over)}")
    return {
        official: _interleaved(tensors[ours], n_heads) if ".qkv." in ours else tensors[ours]
        for official, ours in names.items()
    }


def gpt_neox_settings(config: ModelConfig, *, rotary: bool = True) -> dict[str, Any]:
    """The ``config.json`` of our model as a GPT-NeoX; the inverse of :func:`gpt_neox_config`.

    Args:
        config: Of the model.
        rotary: Whether positions must be rotary.

    Raises:
        InputError: If GPT-NeoX has no such model.
    """
    (item, *others), attention = parse_pattern(config.pattern), config.layers.get("attention", {})
    activation = {ours: official for official, ours in reversed(ACTIVATIONS.items())}
    fits = not others and item.name == "attention" and not item.keywords
    fits = fits and config.block in ("parallel", "sequential") and config.norm == "layer"
    fits = fits and config.max_len is None
    fits = fits and (not rotary or attention.get("position") == "rope")
    if not fits or config.feed_forward not in activation or config.head_bias:
        raise InputError(
            "GPT-NeoX models consist of attention with rotary positions, set for all layers, and "
            f"layer norms, got {config.pattern!r}"
        )
    hidden = config.layers.get("feed_forward", {}).get("d_hidden") or 4 * config.d_model
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": hidden,
        "num_hidden_layers": item.repeat,
        "num_attention_heads": attention.get("n_heads", 4),
        "rotary_pct": attention.get("rotary_fraction", 1.0),
        "rotary_emb_base": attention.get("rope_base", 10_000.0),
        "attention_bias": attention.get("bias", False),
        "use_parallel_residual": config.block == "parallel",
        "hidden_act": activation[config.feed_forward],
        "layer_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


_HEAD = {"lm_head.weight": "embed_out.weight"}
"""Name in newer versions of transformers, and the name in files."""

_PARTS = (
    ("input_layernorm", 0, "norm"),
    ("attention.query_key_value", 0, "layer.qkv"),
    ("attention.dense", 0, "layer.out_proj"),
    ("post_attention_layernorm", 1, "norm"),
    ("mlp.dense_h_to_4h", 1, "layer.in_proj"),
    ("mlp.dense_4h_to_h", 1, "layer.out_proj"),
)
"""The parts of a layer: official name, residual branch, our name in it."""


def _names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Our name of each official one."""
    names = {
        "gpt_neox.embed_in.weight": "embedding.weight",
        "gpt_neox.final_layer_norm.weight": "norm.weight",
        "gpt_neox.final_layer_norm.bias": "norm.bias",
    }
    if not settings.get("tie_word_embeddings", False):
        names["embed_out.weight"] = "head.weight"
    parallel = settings.get("use_parallel_residual", True)
    for layer in range(count(settings, "num_hidden_layers")):
        for part, branch, ours in _PARTS:
            place = f"{layer}.branches.{branch}" if parallel else f"{2 * layer + branch}"
            names[f"gpt_neox.layers.{layer}.{part}.weight"] = f"stack.layers.{place}.{ours}.weight"
            if settings.get("attention_bias", True) or not part.startswith("attention"):
                names[f"gpt_neox.layers.{layer}.{part}.bias"] = f"stack.layers.{place}.{ours}.bias"
    return names


def _queries_first(rows: Tensor, n_heads: int) -> Tensor:
    """Rows in the order q, k, v of all heads; officially, q, k, v of each head in turn."""
    if rows.shape[0] % (3 * n_heads):
        raise InputError(
            f"the published queries, keys and values have {rows.shape[0]} rows, which "
            f"num_attention_heads={n_heads} cannot divide among them"
        )
    return rows.unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _interleaved(rows: Tensor, n_heads: int) -> Tensor:
    """The inverse of :func:`_queries_first`."""
    return rows.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2).contiguous()
