"""H3 and its hybrids, in the formats of the official code."""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.layers import H3, Attention, Residual
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import (
    BUFFERS,
    assemble,
    count,
    number,
    read_tensors,
    rename,
)
from stateline.models.factory import meta_model
from stateline.models.language_model import LanguageModel
from stateline.models.pattern import Value

HeadOrder = Literal["fused", "pytorch"]

_H3 = {
    "q_proj.weight": "q.weight",
    "q_proj.bias": "q.bias",
    "k_proj.weight": "k.weight",
    "k_proj.bias": "k.bias",
    "v_proj.weight": "v.weight",
    "v_proj.bias": "v.bias",
    "ssm_k_kernel.kernel.B": "shift.b",
    "ssm_k_kernel.kernel.C": "shift.c",
    "ssm_k_D": "shift.skip",
    "kernel.kernel.log_dt": "diagonal.log_dt",
    "kernel.kernel.inv_A_real": "diagonal.log_decay",
    "kernel.kernel.A_imag": "diagonal.frequency",
    "kernel.kernel.B": "diagonal.b",
    "kernel.kernel.C": "diagonal.c",
    "D": "diagonal.skip",
    "output_linear.weight": "out_proj.weight",
    "output_linear.bias": "out_proj.bias",
}
"""Our name of each tensor of an official layer; queries, keys and values are joined later."""

_ATTENTION = {
    f"{official}.{part}": f"{ours}.{part}"
    for official, ours in (("Wqkv", "qkv"), ("out_proj", "out_proj"))
    for part in ("weight", "bias")
}


def load_h3(
    source: str | Path | Mapping[str, Tensor],
    config: ModelConfig,
    *,
    head_order: HeadOrder = "fused",
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Read a language model of the official H3 code.

    :func:`stateline.load_pretrained` does the same without a configuration.

    Args:
        source: Its file (safetensors, or pickled, of which only tensors are read), or its state
            dict. Released names and those of older files are understood, and checkpoints of PyTorch
            Lightning.
        config: What the model is made of, such as one of
            :data:`stateline.models.presets.PRESETS`. With ``max_len``, the file must hold learned
            position embeddings.
        head_order: On which of its two paths a model with heads wider than one was trained:
            ``fused`` is the order of the paper; the slow ``pytorch`` path has another.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If the file cannot be read, or its tensors are not those of the configuration.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023; HazyResearch/H3.
    """
    tensors = source if isinstance(source, Mapping) else read_tensors(source)
    return assemble(config, h3_weights(tensors, config, head_order=head_order), device=device)


def h3_weights(
    tensors: Mapping[str, Tensor], config: ModelConfig, *, head_order: HeadOrder = "fused"
) -> dict[str, Tensor]:
    """Our tensors from those of an official language model; see :func:`load_h3`."""
    if head_order not in get_args(HeadOrder):
        raise unknown_name("head_order", head_order, get_args(HeadOrder))
    official, model = released_names(tensors), meta_model(config)
    assert isinstance(model, LanguageModel)
    _check_rotary(official, model)
    head, embedding = official.pop("lm_head.weight", None), f"{EMBEDDING}weight"
    if head is not None and not torch.equal(head, official.get(embedding, head)):
        raise InputError(f"lm_head.weight must equal {embedding}, as in every H3 model")
    ours = rename(official, official_names(model), ignored=BUFFERS)
    for prefix in h3_prefixes(model):
        ours = _finished(ours, prefix, head_order)
    return ours


def h3_config(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Our configuration of an official H3 model, read off the shapes of its tensors.

    Args:
        settings: May have ``num_heads``, the heads of attention, which no tensor tells; by default
            they are those of the released model of that width. Also ``layer_norm_epsilon``.
        shapes: Of its tensors, by any of the official names.

    Raises:
        InputError: If the number of heads is not known, or a tensor is missing.
    """
    empty = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    found = {name: tuple(t.shape) for name, t in released_names(empty).items()}
    try:
        return _read_off(settings, found)
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"the weights are not those of an H3 model: {error!r}") from error


def _read_off(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    vocab_size, width = shapes[f"{EMBEDDING}weight"]
    mixers = [f"backbone.layers.{n}.mixer." for n in range(len(shapes))]
    mixers = [m for m in mixers if f"{m}D" in shapes or f"{m}Wqkv.weight" in shapes]
    layers: dict[str, dict[str, Value]] = {
        "feed_forward": {"d_hidden": shapes["backbone.layers.0.mlp.fc1.weight"][0]}
    }
    for mixer in mixers:
        if f"{mixer}D" in shapes:
            modes, filters = shapes[f"{mixer}kernel.kernel.A_imag"], shapes[f"{mixer}D"][0]
            layers["h3"] = {"d_state": 2 * modes[1], "d_head": width // filters}
            if modes[0] != filters:
                layers["h3"]["n_ssm"] = modes[0]
            layers["h3"]["n_outputs"] = shapes[f"{mixer}kernel.kernel.C"][0]
        else:
            heads = _heads(settings, width)
            layers["attention"] = {"n_heads": heads, "bias": True}
            if rotary := shapes.get(f"{mixer}rotary_emb.inv_freq"):
                fraction = 2 * rotary[0] * heads / width
                layers["attention"] |= {"position": "rope", "rotary_fraction": fraction}
    names = ["h3" if f"{mixer}D" in shapes else "attention" for mixer in mixers]
    runs = [f"{name}*{len(list(run))}" for name, run in groupby(names)]
    return ModelConfig(
        " ".join(runs),
        vocab_size=vocab_size,
        d_model=width,
        norm_eps=number(settings, "layer_norm_epsilon", 1e-5),
        max_len=shapes.get(_POSITIONS, (None,))[0],
        layers=layers,
    )


def _heads(settings: Mapping[str, Any], width: int) -> int:
    if "num_heads" in settings or width not in _RELEASED_HEADS:
        return count(settings, "num_heads")
    return _RELEASED_HEADS[width]


_RELEASED_HEADS = {768: 12, 1024: 16, 2048: 16, 2560: 20}
"""Heads of attention in the released models, by width."""


def h3_prefixes(model: LanguageModel) -> list[str]:
    """Prefix of our names of each H3 layer."""
    return [
        f"stack.layers.{place}.layer."
        for place, link in enumerate(model.stack.links)
        if isinstance(link, Residual) and isinstance(link.layer, H3)
    ]


def h3_layer_weights(
    tensors: Mapping[str, Tensor], *, head_order: HeadOrder = "fused"
) -> dict[str, Tensor]:
    """Our tensors of one H3 layer from those of an official one.

    Args:
        tensors: Its state dict, by official names.
        head_order: As for :func:`load_h3`.

    Returns:
        By our names, for ``load_state_dict``.

    Raises:
        InputError: If tensors are missing or left over.
    """
    return _finished(rename(tensors, _H3), "", head_order)


EMBEDDING = "backbone.embeddings.word_embeddings."
_POSITIONS = "backbone.embeddings.position_embeddings.weight"


def released_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors of any official file the names of the released files.

    Older files have another prefix. In their code, each branch normalised its sum for the next
    branch, so that a norm is named after the branch before it.
    """
    rules = ((r"^s4seq\.encoder\.", "backbone."), (r"^embedding\.", EMBEDDING))
    found = {}
    for name, tensor in tensors.items():
        for old, new in rules:
            name = re.sub(old, new, name)
        found[name] = tensor
    if "backbone.norm.weight" not in found:
        return found
    layers = [int(m[1]) for name in found if (m := re.match(r"backbone\.layers\.(\d+)\.", name))]
    return {_moved_norm(name, max(layers, default=0)): tensor for name, tensor in found.items()}


def _moved_norm(name: str, last: int) -> str:
    """Name in a released file of a norm in an older one."""
    if name.startswith("backbone.norm."):
        return name.replace("norm", "layers.0.norm1", 1)
    match = re.fullmatch(r"backbone\.layers\.(\d+)\.norm([12])\.(\w+)", name)
    if match is None:
        return name
    layer, part = int(match[1]), match[3]
    if match[2] == "1":
        return f"backbone.layers.{layer}.norm2.{part}"
    return f"backbone.ln_f.{part}" if layer == last else f"backbone.layers.{layer + 1}.norm1.{part}"


def official_names(model: LanguageModel) -> dict[str, str]:
    """Our name of each official one; two of our residual branches are one official layer."""
    names = {
        f"{EMBEDDING}weight": "embedding.weight",
        "backbone.ln_f.weight": "norm.weight",
        "backbone.ln_f.bias": "norm.bias",
    }
    if model.positions is not None:
        names[_POSITIONS] = "positions.weight"
    feed_forward = {f"fc1.{p}": f"in_proj.{p}" for p in ("weight", "bias")}
    feed_forward |= {f"fc2.{p}": f"out_proj.{p}" for p in ("weight", "bias")}
    for place, link in enumerate(model.stack.links):
        layer, branch = divmod(place, 2)
        there, here = f"backbone.layers.{layer}.", f"stack.layers.{place}."
        mixer = _H3 if isinstance(link, Residual) and isinstance(link.layer, H3) else _ATTENTION
        part, parts = ("mlp", feed_forward) if branch else ("mixer", mixer)
        names |= {f"{there}{part}.{name}": f"{here}layer.{ours}" for name, ours in parts.items()}
        for p in ("weight", "bias"):
            names[f"{there}norm{branch + 1}.{p}"] = f"{here}norm.{p}"
    return names


def _finished(tensors: Mapping[str, Tensor], prefix: str, order: HeadOrder) -> dict[str, Tensor]:
    """Join queries, keys and values of an H3 layer, and bring its heads into our order."""
    ours = dict(tensors)
    for part in ("weight", "bias"):
        ours[f"{prefix}qkv.{part}"] = torch.cat([ours.pop(f"{prefix}{p}.{part}") for p in "qkv"])
    for name in (f"{prefix}shift.c", f"{prefix}diagonal.c"):
        ours[name] = ours[name].flatten(0, 1)  # the first axis counts filters per channel
    if order == "pytorch":
        heads, name = len(ours[f"{prefix}diagonal.skip"]), f"{prefix}out_proj.weight"
        ours[name] = ours[name].unflatten(1, (-1, heads)).transpose(1, 2).flatten(1)
    return ours


def _check_rotary(tensors: Mapping[str, Tensor], model: LanguageModel) -> None:
    """Compare the number of rotary entries with the frequencies in the file."""
    for place, link in enumerate(model.stack.links[::2]):
        layer = link.layer if isinstance(link, Residual) else None
        found = tensors.get(f"backbone.layers.{place}.mixer.rotary_emb.inv_freq")
        if found is None or not isinstance(layer, Attention):
            continue
        wanted = layer.rotary_dims if layer.position == "rope" else 0
        if wanted != 2 * len(found):
            raise InputError(
                f"the file rotates {2 * len(found)} entries of each head of layer {place}, the "
                f"configuration {wanted}: set position and rotary_fraction of its attention"
            )
