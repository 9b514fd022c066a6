"""Show what architectures cost before they are built: parameters, operations, state by length.

PATTERNS are patterns, names of presets (published models), recipes of stateline train (YAML files),
or folders with a model or GGUF files, whose settings the options override.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from stateline.cli.console import plain_table
from stateline.cli.options import StateDType, add_device_and_dtype, place
from stateline.cli.parser import Parser
from stateline.cli.recipe import SUFFIXES
from stateline.devices import resolve_dtype
from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.pattern import Item, format_pattern
from stateline.reports.format import short_bytes, short_number
from stateline.settings import at_least
from stateline.workers import memory_bytes

if TYPE_CHECKING:
    from rich.console import Console

LENGTHS = [256, 1024, 4096, 16384, 65536]

MAX_PERIOD = 16
"""Largest number of blocks in a repeated group that is folded."""

Facts = Mapping[str, Any]
"""A layer: its name, number of parameters, and bytes of state by length."""


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    about = 'layers, for example "(h3*3 attention)*4", presets: h3-125m, recipes or folders'
    parser.argument("patterns", about, nargs="+")
    parser.option("vocab_size", int, None, "number of tokens; 256 for a pattern or a recipe")
    parser.option("lengths", list[int], LENGTHS, "tokens at which costs are shown")
    parser.switch("json", "print JSON: a list with an object per pattern")
    add_device_and_dtype(parser)
    parser.option("state_dtype", StateDType, None, "dtype of states between steps, as in generate")
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print the tables."""
    given = parser.parse_args(arguments)
    at_least(1, lengths=min(given.lengths))
    settings = given_settings(arguments, parser)
    configs = [resolve(pattern, settings) for pattern in given.patterns]

    from rich.console import Console

    facts = [measure(config, given) for config in configs]
    if given.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = Console(markup=False)
    for number, found in enumerate(facts):
        if number:
            console.print()
        show(console, found)
    return 0


def given_settings(arguments: Sequence[str], parser: Parser) -> dict[str, Any]:
    """Settings of the model that were given, without the defaults of the parser."""
    given = parser.parse_args(arguments, defaults=False).as_dict()
    names = {field.name for field in fields(ModelConfig)} - {"pattern", "layers"}
    return {name: value for name, value in given.items() if name in names and value is not None}


def resolve(text: str, given: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a pattern, preset, recipe or folder.

    A pattern and a recipe, whose vocabulary is that of its task, have 256 tokens by default.
    """
    from stateline.models.presets import configure, find_preset

    if text.endswith(SUFFIXES):
        from stateline.compare.recipe import read_models, read_recipe

        (model,) = read_models([read_recipe(text)[0]])
        if "pooling" in model.model:
            raise InputError(
                f"{text} makes a classifier, which is not shown: give a recipe of a language model"
            )
        settings = {"pattern": model.pattern, "vocab_size": 256, **model.model, **given}
        return ModelConfig(**settings)
    if os.path.exists(text) or "/" in text.partition("(")[0]:
        from stateline.generate.runs import read_model_config

        return replace(read_model_config(text), **given)
    default = {} if find_preset(text) else {"vocab_size": 256}
    return configure(text, **{**default, **given})


def measure(config: ModelConfig, given: Namespace) -> dict[str, Any]:
    """The record of one model that ``--json`` prints."""
    import torch

    from stateline.layers.compose import title
    from stateline.layers.stored_state import stored_bytes
    from stateline.models.factory import meta_model

    (device, dtype), kept = place(given), resolve_dtype(given.state_dtype)
    model = meta_model(config).to(dtype=dtype)

    def count(part: torch.nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    def state(part: Any, length: int) -> int:
        return stored_bytes(part, length, kept) if part.causal else 0

    lengths = given.lengths
    memory = memory_bytes() if device.type == "cpu" else None  # unknown for some devices
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    return {
        "pattern": config.pattern,
        "settings": format_pattern(tuple(Item(n, {**own}) for n, own in config.layers.items())),
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "parameters": count(model),
        "parameters_outside_layers": count(model) - count(model.stack),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "device": str(device),
        "device_bytes": memory,
        "flops_per_token": {length: model.flops_per_token(length) for length in lengths},
        "state_bytes": {length: state(model, length) for length in lengths},
        "layers": [
            {
                "name": title(part),
                "parameters": count(part),
                "state_bytes": {n: state(part, n) for n in (1, max(lengths))},
            }
            for part in model.stack.links
        ],
    }


def show(console: "Console", found: Mapping[str, Any]) -> None:
    """Print the tables of one model."""
    pattern, width = found["pattern"], found["d_model"]
    console.print(f"{pattern}  d_model {width}, vocabulary {found['vocab_size']}")
    if found["settings"]:
        console.print(f"settings: {found['settings']}")
    states = (f"state at {n:,}" for n in found["layers"][0]["state_bytes"])
    layers = plain_table("layer", "parameters of one", *states, left=1)
    for start, count, group in folded(found["layers"]):
        stop = start + count * len(group) - 1
        places = f"{start:>2}" if stop == start else f"{start:>2}-{stop}"
        for row in group:
            name = f"{places} {row['name']}" + (f" x{count}" if count > 1 else "")
            sizes = map(short_bytes, row["state_bytes"].values())
            layers.add_row(name, f"{row['parameters']:,}", *sizes)
    layers.add_row("   embedding, norm, head", f"{found['parameters_outside_layers']:,}")
    layers.add_row("   all", f"{found['parameters']:,}")
    console.print(layers)
    memory = found["device_bytes"]
    has = f", and {found['device']} has {short_bytes(memory)}" if memory else ""
    console.print(f"\nweights: {short_bytes(found['weight_bytes'])}{has}\n")
    costs = plain_table("length", "FLOPs per token (forward)", "state of one sequence")
    for length, flops in found["flops_per_token"].items():
        state = found["state_bytes"][length]
        costs.add_row(f"{length:,}", short_number(flops), short_bytes(state))
    console.print(costs)


def folded(rows: Sequence[Facts]) -> list[tuple[int, int, list[Facts]]]:
    """Fold repeated blocks: index of the first row, number of repeats, and rows of one repeat.

    A feed-forward belongs to the block of the layer before it.

    Example:
        >>> a, b, f = {"name": "A"}, {"name": "B"}, {"name": "FeedForward"}
        >>> [(start, count, len(group)) for start, count, group in folded([a, f, a, f, b, b])]
        [(0, 2, 2), (4, 2, 1)]
    """
    blocks: list[list[Facts]] = []
    for row in rows:
        if blocks and row["name"] == "FeedForward":
            blocks[-1].append(row)
        else:
            blocks.append([row])
    found, place, start = [], 0, 0
    while start < len(blocks):
        count, period = _repeats(blocks[start:])
        group = [row for block in blocks[start : start + period] for row in block]
        found.append((place, count, group))
        start, place = start + count * period, place + count * len(group)
    return found


def _repeats(blocks: Sequence[Sequence[Facts]]) -> tuple[int, int]:
    """Repeats and period such that the repeated blocks at the beginning cover the most blocks."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, len(blocks) // 2) + 1):
        count = 1
        while blocks[count * period : (count + 1) * period] == blocks[:period]:
            count += 1
        if count > 1 and count * period > best[0] * best[1]:
            best = (count, period)
    return best
