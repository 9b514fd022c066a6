"""Error of every layer in float32 and in bfloat16, against float64.

Run it: python examples/bfloat16_errors.py

Layers read random signals. An error is the norm of the difference divided by the norm of what
float64 gives, for the outputs and for the gradients of the input and of all weights together, of
the product of the outputs with random signals. The table shows medians of the seeds. Autocast is
the bfloat16 of training: weights and states stay float32. In the last column weights, inputs and
outputs are bfloat16, as in decoding with such weights.
"""

import argparse
import statistics
from copy import deepcopy

import torch
from torch import Tensor, nn

from stateline.layers import LAYERS

COLUMNS = ("float32", "autocast", "bfloat16")


def results(layer: nn.Module, x: Tensor, g: Tensor, *, autocast: bool) -> list[Tensor]:
    """Outputs and gradients, each as one vector in float64."""
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    used = [p for p in layer.parameters() if p.requires_grad]
    found = torch.autograd.grad((y.double() * g).sum(), [x, *used], allow_unused=True)
    flat = [t.double().flatten() for t in found if t is not None]
    return [y.detach().double().flatten(), torch.cat(flat)]


def errors(kind: str, seed: int, given: argparse.Namespace) -> list[float]:
    """For each column the error of outputs and that of gradients."""
    torch.manual_seed(seed)
    layer = LAYERS[kind](given.width).eval()
    x = torch.randn(given.rows, given.length, given.width, dtype=torch.float64)
    g = torch.randn(given.rows, given.length, given.width, dtype=torch.float64)
    exact = results(deepcopy(layer).double(), x.clone(), g, autocast=False)
    found = []
    for column in COLUMNS:
        dtype = torch.bfloat16 if column == "bfloat16" else torch.float32
        own = results(deepcopy(layer).to(dtype), x.to(dtype), g, autocast=column == "autocast")
        found += [
            float((a - b).norm() / b.norm()) if len(a) == len(b) else float("nan")
            for a, b in zip(own, exact, strict=True)
        ]
    return found


def main(given: argparse.Namespace) -> None:
    """Print a row for each layer."""
    print(f"| | {' | '.join(f'{name} | gradients' for name in COLUMNS)} |")
    print("|" + "---|" * (1 + 2 * len(COLUMNS)))
    for kind in given.layers:
        each = zip(*(errors(kind, seed, given) for seed in given.seeds), strict=True)
        shown = (f"{statistics.median(values):.1e}" for values in each)
        print(f"| `{kind}` | {' | '.join(shown)} |", flush=True)


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
