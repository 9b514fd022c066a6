"""H3 and its hybrids, in both formats of the official code."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from stateline.errors import InputError, unknown_name
from stateline.layers import H3, Attention, Residual
from stateline.models.config import ModelConfig
from stateline.models.convert.weights import assemble, read_tensors, rename
from stateline.models.language_model import LanguageModel

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
"""Our name of each tensor of an official layer; queries, keys and values are joined afterwards."""

_ATTENTION = {
    f"{official}.{part}": f"{ours}.{part}"
    for official, ours in (("Wqkv", "qkv"), ("out_proj", "out_proj"))
    for part in ("weight", "bias")
}
_ROTARY = r"\.rotary_emb\.inv_freq$"


def load_h3(
    source: str | Path | Mapping[str, Tensor],
    config: ModelConfig,
    *,
    head_order: HeadOrder = "fused",
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """Read a language model of the official H3 code.

    Args:
        source: Its file (pickled tensors, no code of which is run, or safetensors), or its state
            dict. The released names are understood, and those of older files; so are files of
            PyTorch Lightning.
        config: What the model is made of: one of :data:`stateline.models.presets.PRESETS`, say.
        head_order: For heads wider than one, on which of its two paths the model was trained:
            ``fused`` is the order of the paper; the slow ``pytorch`` path has another.
        device: Where the weights shall be.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If the file cannot be read, or its tensors are not those of the configuration.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023; HazyResearch/H3.
    """
    if head_order not in get_args(HeadOrder):
        raise unknown_name("head_order", head_order, get_args(HeadOrder))
    tensors = source if isinstance(source, Mapping) else read_tensors(source)
    official = released_names(tensors)
    with torch.device("meta"):
        model = LanguageModel(config)
    _check_rotary(official, model)
    head, embedding = official.pop("lm_head.weight", None), f"{_EMBEDDING}weight"
    if head is not None and not torch.equal(head, official.get(embedding, head)):
        raise InputError(f"lm_head.weight must be the same as {embedding}, as in every H3 model")
    ours = rename(official, _names(model), ignored=_ROTARY)
    for number, link in enumerate(model.stack.links):
        if isinstance(link, Residual) and isinstance(link.layer, H3):
            ours = _finished(ours, f"stack.layers.{number}.layer.", head_order)
    return assemble(config, ours, device=device)


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


_EMBEDDING = "backbone.embeddings.word_embeddings."


def released_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of the released files, whichever format the tensors come from.

    Older files have another prefix. Their residual stream was normalised after each branch for the
    next one, so that their norms are named after the branch before.
    """
    rules = ((r"^s4seq\.encoder\.", "backbone."), (r"^embedding\.", _EMBEDDING))
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
    """Where a norm of an older file stands in a released one."""
    if name.startswith("backbone.norm."):
        return name.replace("norm", "layers.0.norm1", 1)
    match = re.fullmatch(r"backbone\.layers\.(\d+)\.norm([12])\.(\w+)", name)
    if match is None:
        return name
    layer, part = int(match[1]), match[3]
    if match[2] == "1":
        return f"backbone.layers.{layer}.norm2.{part}"
    return f"backbone.ln_f.{part}" if layer == last else f"backbone.layers.{layer + 1}.norm1.{part}"


def _names(model: LanguageModel) -> dict[str, str]:
    """Our name of each official one; two residual branches of ours are one layer there."""
    names = {
        f"{_EMBEDDING}weight": "embedding.weight",
        "backbone.ln_f.weight": "norm.weight",
        "backbone.ln_f.bias": "norm.bias",
    }
    feed_forward = {f"fc1.{p}": f"in_proj.{p}" for p in ("weight", "bias")}
    feed_forward |= {f"fc2.{p}": f"out_proj.{p}" for p in ("weight", "bias")}
    for number, link in enumerate(model.stack.links):
        layer, branch = divmod(number, 2)
        there, here = f"backbone.layers.{layer}.", f"stack.layers.{number}."
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
        ours[name] = ours[name].flatten(0, 1)  # filters of a channel, of which there is one
    if order == "pytorch":
        heads, name = len(ours[f"{prefix}diagonal.skip"]), f"{prefix}out_proj.weight"
        ours[name] = ours[name].unflatten(1, (-1, heads)).transpose(1, 2).flatten(1)
    return ours


def _check_rotary(tensors: Mapping[str, Tensor], model: LanguageModel) -> None:
    """Files with rotary positions hold their frequencies, which tell how many entries they turn."""
    for number, link in enumerate(model.stack.links[::2]):
        layer = link.layer if isinstance(link, Residual) else None
        found = tensors.get(f"backbone.layers.{number}.mixer.rotary_emb.inv_freq")
        if found is None or not isinstance(layer, Attention):
            continue
        wanted = layer.rotary_dims if layer.position == "rope" else 0
        if wanted != 2 * len(found):
            raise InputError(
                f"the file turns {2 * len(found)} entries of each head of layer {number}, the "
                f"configuration {wanted}: set position and rotary_fraction of its attention"
            )
