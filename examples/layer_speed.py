"""Time single layers on whole sequences of several lengths.

Run it: python examples/layer_speed.py

The layers are the ones of the Block-State comparison, each with a norm before it, and with
``--feed_forward`` also with the feed-forward that follows it in a model. On the CPU, the processor
time of one thread is measured. The layers take turns, so that other programs disturb them alike.
The shortest time of several rounds is printed.
"""

import argparse
import time

import torch

from stateline import ModelConfig
from stateline.models.build import build_stack

SLIDING = "sliding_attention(position=t5, includes_self=false, qk_norm=true"
PATTERNS = (
    SLIDING,
    "block_state(variant=sh",
    "block_state(variant=mh",
    "block_state(variant=mf",
    "block_recurrent(n_states={window}",
)


def main(sizes: argparse.Namespace) -> None:
    """Print a table: microseconds per token, and the ratio to the first layer."""
    torch.set_num_threads(1)
    feed_forward = "gelu" if sizes.feed_forward else "none"
    shared = f", n_heads={sizes.n_heads}, window={sizes.window})"
    patterns = [pattern.format(window=sizes.window) + shared for pattern in PATTERNS]
    layers = [
        build_stack(ModelConfig(p, vocab_size=1, d_model=sizes.d_model, feed_forward=feed_forward))
        for p in patterns
    ]
    columns = [rounds(layers, length, sizes) for length in sizes.lengths]
    print("microseconds per token (ratio to the first) at " + ", ".join(map(str, sizes.lengths)))
    for number, pattern in enumerate(patterns):
        cells = "".join(f"{c[number]:10.1f} ({c[number] / c[0]:5.2f})" for c in columns)
        print(f"{cells}  {pattern}")


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--feed_forward", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
