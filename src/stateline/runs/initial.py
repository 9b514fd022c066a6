"""The model whose weights a run starts from."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stateline.data import load_tokenizer
from stateline.errors import InputError
from stateline.generate.runs import find_model, load_any_run, own_tokenizer, read_model_config
from stateline.layers import SequenceLayer
from stateline.layers.compose import ParallelResidual, inside
from stateline.models.config import ModelConfig
from stateline.models.factory import AnyModel, make_model, meta_model
from stateline.models.language_model import LanguageModel
from stateline.models.starts import (
    alike,
    changed,
    fit_outputs,
    fitted,
    replaced,
    staying,
    take_heads,
)
from stateline.tasks import Task

FREE: tuple[str, ...] = ("embedding_dropout", "residual_dropout", "init")
"""Settings that may differ from the initial model's: they do not change the function."""

OF_OUTPUTS = ("tie_embeddings", "head_bias", "logits_divisor", "logits_soft_cap")
"""Settings of the outputs of a language model, without effect in other kinds."""


MOST = 64
"""Most training batches that are read to fit the outputs of new layers."""


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """The settings of a model for another task; the task sets its inputs and outputs."""
    shared = {field.name for field in dataclasses.fields(ModelConfig)} - {"pattern", "vocab_size"}
    return {name: value for name, value in dataclasses.asdict(config).items() if name in shared}


def as_in_folder(config: ModelConfig, folder: str) -> ModelConfig:
    """The configuration of a model for a task that starts from the model in a folder.

    A language model gets the vocabulary of that language model. For any other pair of kinds, the
    task sets inputs and outputs. The pattern may have other layers in the same places.

    Raises:
        InputError: If there is no model, or the task's model would have other settings, or layers
            in other places.
    """
    source, free = read_model_config(folder), FREE
    if type(config) is type(source) is ModelConfig:
        if config.vocab_size > source.vocab_size:
            raise InputError(
                f"the task has {config.vocab_size:,} tokens, but the model in {folder} "
                f"{source.vocab_size:,}: choose a tokenizer with fewer"
            )
        config = dataclasses.replace(config, vocab_size=source.vocab_size)
    else:
        free += OF_OUTPUTS
        if type(config) is not type(source) and (
            source.embedding_norm or source.embedding_multiplier != 1
        ):
            raise InputError(
                f"the model in {folder} scales or normalises its embeddings, which a "
                f"{config.kind.replace('_', ' ')} does not: choose a task for a "
                f"{source.kind.replace('_', ' ')}"
            )
    for name, there in settings_of(source).items():
        if name not in free and (own := getattr(config, name)) != there:
            way_out = "leave out options that change its layers"
            if name == "layers":
                way_out = "give settings of new layers in the pattern, as in h3(d_state=16)"
            raise InputError(
                f"{name} would be {own!r}, but in the model in {folder} it is {there!r}: {way_out}"
            )
    if config.pattern != source.pattern and places(config) != places(source):
        raise InputError(
            f"the layers of {config.pattern!r} do not stand in the places of those of the model in "
            f"{folder}, {source.pattern!r}: replace layers one by one, and put a feed-forward "
            "after one that has none, as in 'attention mamba feed_forward' for 'attention*2'"
        )
    return config


def places(config: ModelConfig) -> list[list[bool]]:
    """Which layers are feed-forwards, for each part of the stack."""
    parts = meta_model(config).stack.links
    branches = (p.links if isinstance(p, ParallelResidual) else [inside(p)] for p in parts)
    return [[layer.is_feed_forward for layer in b] for b in branches]


def check_tokenizer(task: Any, folder: str) -> None:
    """Check that a task on text has the tokenizer of the model in a folder, if there is one.

    Raises:
        InputError: If a token means something else in the task.
    """
    file = own_tokenizer(find_model(folder)) if task.has_text else None
    if file is None:
        return
    both = [each.without_beginning() for each in (task.tokenizer, load_tokenizer(file))]
    if both[0].to_json() == both[1].to_json():
        return
    for number in range(min(each.vocab_size for each in both)):
        here, there = (each.decode([number]) for each in both)
        if here != there:
            raise InputError(
                f"the task must have the tokenizer of the model in {folder}: token {number} is "
                f"{there!r} there, but {here!r} in the task; make a corpus with stateline data "
                f"--tokenizer {file}, or take answers(tokenizer={file})"
            )


def new_tensors(config: ModelConfig, source: ModelConfig) -> list[str]:
    """Names of the weights that a model of ``source`` lacks or has in another shape.

    Layers correspond by their place. A layer that replaces another kind is new, but for its norm.

    A head of another kind or with another pooling computes something else, so it is new.
    """
    model, start = meta_model(config), meta_model(source)
    wanted, unlike = model.state_dict(), _unlike(model, start)
    shapes = {n: t.shape for n, t in _offered(start.state_dict(), wanted).items()}
    if any(getattr(source, n, None) != getattr(config, n, None) for n in ("kind", "pooling")):
        unlike += ("head.",)
    return [n for n, t in wanted.items() if shapes.get(n) != t.shape or n.startswith(unlike)]


def _unlike(model: AnyModel, start: AnyModel) -> tuple[str, ...]:
    """Beginnings of the names of weights in layers that replace another kind."""
    others = dict(start.named_modules())
    return tuple(
        f"{name}."
        for name, layer in model.named_modules()
        if name in others and isinstance(layer, SequenceLayer) and layer is not model
        if not alike(layer, others[name])
    )


def _offered(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by their names, also by those of attention that maps queries apart, or together."""
    found = dict(weights)
    for name, tensor in weights.items():
        layer, joined, kind = name.rpartition(".qkv.")
        parts = [f"{layer}.{part}_proj.{kind}" for part in ("q", "kv")]
        sizes = [len(wanted[part]) for part in parts if joined and part in wanted]
        if len(sizes) == 2 and sum(sizes) == len(tensor):
            found |= zip(parts, tensor.split(sizes), strict=True)
        layer, apart, kind = name.rpartition(".q_proj.")
        whole, others = f"{layer}.qkv.{kind}", f"{layer}.kv_proj.{kind}"
        if apart and others in weights and whole in wanted:
            found[whole] = torch.cat([tensor, weights[others]])
    return found


def listed(config: ModelConfig, names: Sequence[str]) -> str:
    """Names of weights in one line, by the layers of the pattern that they are in, from 0.

    Layers and feed-forwards with the same weights stand together.

    Example:
        >>> config = ModelConfig("attention h3", vocab_size=8, d_model=8)
        >>> names = ("stack.layers.0.layer.a", "stack.layers.2.layer.a", "stack.layers.3.layer.b")
        >>> listed(config, [*names, "head.bias"])
        'a of layers 0 and 1, b of feed-forward 1, head.bias'
        >>> listed(ModelConfig("h3*5", 8, d_model=8), [f"stack.layers.{n}.a" for n in (0, 4, 6, 8)])
        'a of layers 0 and 2 to 4'
    """
    numbered, count = [], -1
    for branches in places(config):
        count += not all(branches)
        numbered.append(("feed-forward" if all(branches) else "layer", count))
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        if name.startswith("stack.layers."):
            number, weight = name.removeprefix("stack.layers.").split(".", 1)
            kind, place = numbered[int(number)]
            found.setdefault((weight.removeprefix("layer."), kind), []).append(place)
        else:
            found[name, ""] = []
    return ", ".join(
        f"{name} of {kind}{'s' * (len(numbers) > 1)} {_in_runs(numbers)}" if kind else name
        for (name, kind), numbers in found.items()
    )


def _in_runs(numbers: Sequence[int]) -> str:
    """Rising numbers in words; of three or more in a row, the first and the last."""
    places = enumerate(numbers)
    runs = [[n for _, n in run] for _, run in groupby(places, key=lambda pair: pair[1] - pair[0])]
    words = [f"{run[0]} to {run[-1]}" if run[2:] else " and ".join(map(str, run)) for run in runs]
    return " and ".join(words)


def start_in_words(config: ModelConfig, folder: str) -> str:
    """What a model of ``config`` takes from the model in a folder, in words."""
    source = read_model_config(folder)
    model, start = meta_model(config), meta_model(source)
    new, parts = new_tensors(config, source), [f"starting from the weights in {folder}"]
    if isinstance(model, LanguageModel) and isinstance(start, LanguageModel):
        kept = _staying(model, start)
        new = [name for name in new if not name.startswith(kept)]
        parts += filter(None, [listed(config, _begun(model, start))])
    return "; ".join([*parts, f"new weights: {listed(config, new) or 'none'}"])


def _staying(model: LanguageModel, start: LanguageModel) -> tuple[str, ...]:
    """Beginnings of the names of weights that are those of heads that stay beside a recurrence."""
    found = {
        part
        for _, branch, other in replaced(model, start)
        for part in staying(branch.layer, other.layer)
    }
    return tuple(f"{name}." for name, layer in model.named_modules() if layer in found)


def _begun(model: LanguageModel, start: LanguageModel) -> list[str]:
    """How layers begin that differ from the old ones, as names of parts of blocks."""
    fits, blocks = fitted(model, start), {block for block, *_ in replaced(model, start)}
    ways = {
        "fitted outputs": fits,
        "unfitted outputs": blocks - fits,
        "old queries, keys and values": take_heads(model, start),
        "other settings": changed(model, start),
    }
    return [f"stack.layers.{block}.{way}" for way, own in ways.items() for block in sorted(own)]


def start_from(
    config: ModelConfig,
    folder: str,
    task: Task | None = None,
    device: torch.device | str = "cpu",
) -> AnyModel:
    """A model in float32 with the weights of the model in a folder, and new ones where none fits.

    New layers of a language model begin with the outputs of those that they replace, as far as
    their last maps can: see :func:`~stateline.models.starts.fit_outputs`.

    Args:
        config: The model, from :func:`as_in_folder`.
        folder: A model of any kind, ours or published.
        task: Its first training batches are read to fit the outputs; without it, none are.
        device: Device of the model.

    Raises:
        InputError: If its files are missing or damaged.
    """
    source = load_any_run(folder, dtype=torch.float32, device=device)
    if source.config == config:
        return source
    model, new = make_model(config).to(device), new_tensors(config, source.config)
    weights = _offered(source.state_dict(), model.state_dict())
    model.load_state_dict({n: weights[n] for n in model.state_dict() if n not in new}, strict=False)
    if isinstance(model, LanguageModel) and isinstance(source, LanguageModel):
        take_heads(model.eval(), source)
        if task is not None:
            fit_outputs(model, source, (task.train_batch(index).tokens for index in range(MOST)))
    return model
