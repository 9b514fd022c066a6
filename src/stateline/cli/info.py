"""Show what an architecture costs before it is built: parameters, operations, state by length.

PATTERN is a pattern, or the name of a published model, whose settings options override.
"""

import dataclasses
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from stateline.models.config import ModelConfig
from stateline.models.presets import find_preset

LENGTHS = (256, 1024, 4096, 16384, 65536)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "pattern", type=str, help='layers, for example "attention h3*2", or a preset: h3-125m'
    )
    parser.add_argument("--vocab_size", type=int, default=256, help="number of tokens")
    parser.add_class_arguments(ModelConfig, skip={"pattern", "vocab_size", "layers"})


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print the tables."""
    given = parser.parse_args(arguments).as_dict()
    preset = find_preset(given["pattern"])
    if preset is not None:
        settings = dataclasses.asdict(preset)
        pattern, layers = settings.pop("pattern"), settings.pop("layers")
        parser.set_defaults(settings)
        given = parser.parse_args(arguments).as_dict() | {"pattern": pattern, "layers": layers}
    config = ModelConfig(**given)

    from rich.console import Console
    from rich.table import Table

    from stateline.layers.compose import title
    from stateline.models.size import count_parameters, meta_model
    from stateline.reports.format import short_bytes, short_number

    model = meta_model(config)
    console = Console()
    console.print(f"{config.pattern}  d_model {config.d_model}, vocabulary {config.vocab_size}")
    layers = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("layer", "parameters", "state at 1", f"state at {LENGTHS[-1]:,}"):
        layers.add_column(heading, justify="left" if heading == "layer" else "right")
    for number, part in enumerate(model.stack.links):
        parameters = sum(p.numel() for p in part.parameters())
        sizes = (short_bytes(part.state_bytes(length)) for length in (1, LENGTHS[-1]))
        layers.add_row(f"{number:>2} {title(part)}", f"{parameters:,}", *sizes)
    frame = count_parameters(config) - sum(p.numel() for p in model.stack.parameters())
    layers.add_row("   embedding, norm, head", f"{frame:,}")
    layers.add_row("   all", f"{count_parameters(config):,}")
    console.print(layers)
    console.print()
    costs = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("length", "FLOPs per token (forward)", "state of one sequence"):
        costs.add_column(heading, justify="right")
    for length in LENGTHS:
        flops, state = model.flops_per_token(length), model.state_bytes(length)
        costs.add_row(f"{length:,}", short_number(flops), short_bytes(state))
    console.print(costs)
    return 0
