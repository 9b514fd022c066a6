"""How exactly packed rows equal documents in separate rows, for every layer and 20 hybrids.

Run it: python examples/packing_law.py

    python examples/packing_law.py mamba "h3 attention" --length 200

The table has the worst of several seeds: differences of outputs relative to their norm, without and
with a state before them, then differences of gradients. In float64, these are relative to the
largest entry of each tensor; in float32, to the norm of all, with the limit of the law beside them.
"""

import argparse
from collections.abc import Sequence

import torch

from stateline.layers import LAYERS
from stateline.layers.law.case import Case, example_input
from stateline.layers.law.packing import packed_rows_agree
from stateline.layers.law.report import Finding
from stateline.models.build import build_stack
from stateline.models.presets import configure

HYBRIDS = (
    "h3 attention",
    "mamba attention",
    "mamba2 sliding_attention",
    "gated_delta_net*2 attention",
    "rg_lru rg_lru sliding_attention",
    "s4d long_conv",
    "s5 lstm",
    "dss gss",
    "linear_attention gated_conv",
    "block_recurrent mamba",
    "block_state attention",
    "shift_ssm diagonal_ssm",
    "h3 h3 feed_forward",
    "ladder(mamba attention)",
    "staircase(gated_delta_net)",
    "state_passing(h3) attention",
    "ladder(staircase(h3))",
    "cached_staircase(attention) mamba2",
    "feedback(attention) s4",
    "staircase(ladder(attention) lstm) h3",
)


def findings(pattern: str, dtype: torch.dtype, *, length: int = 40, seed: int = 0) -> list[Finding]:
    """What the law finds for packed rows of a model's layers."""
    torch.manual_seed(seed)
    layer = build_stack(configure(pattern, vocab_size=1, d_model=16)).to(dtype).eval()
    x, early = example_input(layer, 2, length, dtype), 2 * length // 5
    return list(packed_rows_agree(Case(layer, x, (early, length - early), dtype)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="layers; by default all, and 20 hybrids")
    parser.add_argument("--length", type=int, default=40, help="positions in a row")
    parser.add_argument("--seeds", type=int, default=3, help="inputs and weights of each")
    given = parser.parse_args(arguments)
    print("| layers | float64 | gradients | float32 | gradients | allowed |")
    print("|---" * 6 + "|")
    for pattern in given.patterns or [*LAYERS, *HYBRIDS]:
        cells, said = [pattern], ""
        for dtype in (torch.float64, torch.float32):
            runs = [
                findings(pattern, dtype, length=given.length, seed=seed)
                for seed in range(given.seeds)
            ]
            found = [finding for run in runs for finding in run]
            cells += [f"{max(f.error for f in found[part::2]):.1e}" for part in (0, 1)]
            worst = max(found, key=lambda f: f.error / f.limit)
            said = f"{worst.error / worst.limit:.0%} of {worst.limit:.1e}"
            if not all(f.ok for f in found):
                cells.append("BROKEN")
        print(f"| {' | '.join([*cells, said])} |", flush=True)


if __name__ == "__main__":
    main()
