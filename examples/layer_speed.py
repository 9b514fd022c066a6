"""Time single layers on whole sequences of several lengths.

Run it: python examples/layer_speed.py

The layers are the ones of the Block-State comparison, each with a norm before it, and with
``--feed_forward`` also with the feed-forward that follows it in a model. On the CPU, the processor
time of one thread is measured. The layers take turns, so that other programs disturb them alike. A
measurement takes the shortest time of several rounds; each has its own layers, from its own seed.
The medians are printed, and with ``--record FILE`` all measurements are stored as a table, from
which the paper's page is made.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from stateline import ModelConfig
from stateline.models.build import build_stack
from stateline.papers.record import RecordedRow, TableRecord, write_table
from stateline.train.environment import environment

PATTERNS = {
    "sliding windows": "sliding_attention(position=t5, includes_self=false, qk_norm=true",
    "SH": "block_state(variant=sh",
    "MH": "block_state(variant=mh",
    "MF": "block_state(variant=mf",
    "Block-Recurrent": "block_recurrent(n_states={window}",
}


def main(sizes: argparse.Namespace) -> None:
    """Print a table: microseconds per token, and the ratio to the first layer."""
    torch.set_num_threads(1)
    seeds = range(sizes.repeats)
    each = [
        [rounds(layers(sizes, seed), length, sizes) for seed in seeds] for length in sizes.lengths
    ]
    columns = [[statistics.median(times) for times in zip(*found, strict=True)] for found in each]
    print("microseconds per token (ratio to the first) at " + ", ".join(map(str, sizes.lengths)))
    for number, pattern in enumerate(PATTERNS.values()):
        cells = "".join(f"{c[number]:10.1f} ({c[number] / c[0]:5.2f})" for c in columns)
        print(f"{cells}  {pattern.format(window=sizes.window)}{shared(sizes)}")
    if sizes.record:
        write_table(sizes.record, recorded(each, sizes))


def shared(sizes: argparse.Namespace) -> str:
    """What the layers have in common."""
    return f", n_heads={sizes.n_heads}, window={sizes.window})"


def layers(sizes: argparse.Namespace, seed: int) -> list[torch.nn.Module]:
    """All layers, with weights by the seed."""
    torch.manual_seed(seed)
    kind = {"d_model": sizes.d_model, "feed_forward": "gelu" if sizes.feed_forward else "none"}
    patterns = (p.format(window=sizes.window) + shared(sizes) for p in PATTERNS.values())
    return [build_stack(ModelConfig(p, vocab_size=1, **kind)) for p in patterns]


def recorded(each: list[list[list[float]]], sizes: argparse.Namespace) -> TableRecord:
    """The table of all measurements: each length, seed and layer."""
    first, *others = sizes.lengths
    columns = [f"microseconds per token at {first:,}", *(f"at {length:,}" for length in others)]
    rows = [
        RecordedRow(
            label=label,
            seeds=list(range(sizes.repeats)),
            values=[[round(times[number], 1) for times in found] for found in each],
        )
        for number, label in enumerate(PATTERNS)
    ]
    return TableRecord(
        table="",
        size="laptop",
        command=" ".join(["python examples/layer_speed.py", *given(sizes)]),
        created=datetime.now(UTC).date().isoformat(),
        environment=environment(),
        columns=columns,
        rows=rows,
    )


@torch.inference_mode()
def rounds(layers: list[torch.nn.Module], length: int, sizes: argparse.Namespace) -> list[float]:
    """Shortest time of each layer in microseconds per token."""
    x = torch.randn(1, length, sizes.d_model, device=sizes.device)
    best = [float("inf")] * len(layers)
    for _ in range(sizes.rounds + 1):
        for number, layer in enumerate(layers):
            layer.to(sizes.device)
            started = clock(sizes.device)
            layer(x)
            best[number] = min(best[number], 1e6 * (clock(sizes.device) - started) / length)
    return best


def given(sizes: argparse.Namespace) -> Iterator[str]:
    """The options that differ from their defaults, except where the table goes."""
    for name, value in vars(sizes).items():
        if name != "record" and value != arguments().get_default(name):
            values = value if isinstance(value, list) else [value]
            yield f"--{name}" if value is True else " ".join(map(str, [f"--{name}", *values]))


def clock(device: str) -> float:
    """Processor time of this process, or the time after all work on the GPU is done; in seconds."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def arguments() -> argparse.ArgumentParser:
    """Declare the options; the default sizes follow the paper, as we understand it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--n_heads", type=int, default=16)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=5, help="per measurement")
    parser.add_argument("--repeats", type=int, default=1, help="measurements")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--feed_forward", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
