"""Show what architectures cost before they are built: parameters, operations, state by length.

PATTERNS are patterns, names of presets (published models), or folders with a model, whose settings
the options override.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser

from stateline.cli.console import plain_table
from stateline.devices import DTypeName, add_device_option, add_dtype_option
from stateline.models.config import ModelConfig
from stateline.workers import memory_bytes

if TYPE_CHECKING:
    from rich.console import Console

LENGTHS = (256, 1024, 4096, 16384, 65536)

STATE_LENGTHS = (1, LENGTHS[-1])
"""Lengths at which the state of each layer is shown."""

MAX_PERIOD = 16
"""Most blocks in a group that is looked for when repeated blocks are folded."""


class Row(NamedTuple):
    """A layer: its name, number of parameters, and bytes of state by length."""

    name: str
    parameters: int
    state_bytes: tuple[int, ...]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "patterns",
        nargs="+",
        type=str,
        help='layers, for example "(h3*3 attention)*4", presets: h3-125m, or folders',
    )
    parser.add_argument("--vocab_size", type=int, help="number of tokens; 256 for a pattern")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of one per pattern")
    add_device_option(parser)
    add_dtype_option(parser)
    parser.add_argument(
        "--state_dtype",
        type=DTypeName | None,
        help="precision in which states are kept between steps, as of generate --state_dtype",
    )
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the tables."""
    options = parser.parse_args(arguments).as_dict()
    config_options = given_settings(arguments, parser, options)
    configs = [resolve(pattern, config_options) for pattern in options["patterns"]]

    from rich.console import Console

    precisions = options["dtype"], options["state_dtype"]
    facts = [measure(config, *precisions, options["device"]) for config in configs]
    if options["json"]:
        print(json.dumps(facts, indent=2))
        return 0
    console = Console()
    for number, found in enumerate(facts):
        if number:
            console.print()
        show(console, found)
    return 0


def given_settings(
    arguments: Sequence[str], parser: ArgumentParser, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the model that were given, without the defaults of the parser."""
    own = ("pattern", "layers")
    names = {f.name for f in ModelConfig.__dataclass_fields__.values() if f.name not in own}
    given = parser.parse_args(arguments, defaults=False).as_dict()
    return {name: options[name] for name in names & given.keys() if given[name] is not None}


def resolve(text: str, given: Mapping[str, Any], vocab_size: int = 256) -> ModelConfig:
    """The configuration of a pattern, preset or folder; patterns have ``vocab_size`` by default."""
    from stateline.models.presets import configure, find_preset

    if os.path.isdir(text):
        from stateline.generate.runs import read_model_config

        return replace(read_model_config(text), **given)

    default = {} if find_preset(text) else {"vocab_size": vocab_size}
    return configure(text, **{**default, **given})


def measure(
    config: ModelConfig, dtype: str | None, state_dtype: str | None, device: str
) -> dict[str, Any]:
    """The record of one model that ``--json`` prints."""
    from stateline.devices import resolve_device, resolve_dtype
    from stateline.layers.compose import title
    from stateline.layers.stored_state import stored_bytes
    from stateline.models.factory import meta_model

    model = meta_model(config)
    if (wanted := resolve_dtype(dtype)) is not None:
        model = model.to(wanted)
    kept = resolve_dtype(state_dtype)
    rows = [
        Row(
            title(part),
            sum(p.numel() for p in part.parameters()),
            tuple(stored_bytes(part, length, kept) for length in STATE_LENGTHS),
        )
        for part in model.stack.links
    ]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "pattern": config.pattern,
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "parameters": parameters,
        "parameters_outside_layers": parameters - sum(p.numel() for p in model.stack.parameters()),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "device": str(found := resolve_device(device)),
        "device_bytes": memory_of(found),
        "flops_per_token": {length: model.flops_per_token(length) for length in LENGTHS},
        "state_bytes": {length: stored_bytes(model, length, kept) for length in LENGTHS},
        "layers": [
            {
                "name": row.name,
                "parameters": row.parameters,
                "state_bytes": dict(zip(STATE_LENGTHS, row.state_bytes, strict=True)),
            }
            for row in rows
        ],
    }


def memory_of(device: Any) -> int | None:
    """Bytes of memory of a device; ``None`` if it does not tell."""
    import torch

    if device.type == "cpu":
        return memory_bytes()
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def show(console: "Console", found: Mapping[str, Any]) -> None:
    """Print the tables of one model."""
    from stateline.reports.format import short_bytes, short_number

    pattern, width = found["pattern"], found["d_model"]
    console.print(f"{pattern}  d_model {width}, vocabulary {found['vocab_size']}", markup=False)
    states = (f"state at {n:,}" for n in STATE_LENGTHS)
    layers = plain_table("layer", "parameters of one", *states, left=1)
    rows = [
        Row(row["name"], row["parameters"], tuple(row["state_bytes"].values()))
        for row in found["layers"]
    ]
    for start, count, group in folded(rows):
        stop = start + count * len(group) - 1
        places = f"{start:>2}" if stop == start else f"{start:>2}-{stop}"
        for row in group:
            name = f"{places} {row.name}" + (f" x{count}" if count > 1 else "")
            layers.add_row(name, f"{row.parameters:,}", *map(short_bytes, row.state_bytes))
    layers.add_row("   embedding, norm, head", f"{found['parameters_outside_layers']:,}")
    layers.add_row("   all", f"{found['parameters']:,}")
    console.print(layers)
    memory = found["device_bytes"]
    has = f", and {found['device']} has {short_bytes(memory)}" if memory else ""
    console.print(f"\nweights: {short_bytes(found['weight_bytes'])}{has}\n")
    costs = plain_table("length", "FLOPs per token (forward)", "state of one sequence")
    for length in LENGTHS:
        flops, state = found["flops_per_token"][length], found["state_bytes"][length]
        costs.add_row(f"{length:,}", short_number(flops), short_bytes(state))
    console.print(costs)


def folded(rows: Sequence[Row]) -> list[tuple[int, int, list[Row]]]:
    """Fold repeated blocks: index of the first row, number of repeats, and rows of one repeat.

    A feed-forward belongs to the block of the layer before it.

    Example:
        >>> a, b, f = Row("A", 1, ()), Row("B", 2, ()), Row("FeedForward", 3, ())
        >>> [(start, count, len(group)) for start, count, group in folded([a, f, a, f, b, b])]
        [(0, 2, 2), (4, 2, 1)]
    """
    blocks: list[list[Row]] = []
    for row in rows:
        if blocks and row.name == "FeedForward":
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


def _repeats(blocks: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Repeats and period of the repeated blocks at the beginning that cover the most."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, len(blocks) // 2) + 1):
        count = 1
        while blocks[count * period : (count + 1) * period] == blocks[:period]:
            count += 1
        if count > 1 and count * period > best[0] * best[1]:
            best = (count, period)
    return best
