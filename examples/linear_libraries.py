"""Time the linear maps of PyTorch's two libraries, MKL and oneDNN, in turns.

Run it: python examples/linear_libraries.py

    python examples/linear_libraries.py --rows 32 128 --widths 256:768 256:256

Processor time of one thread, without gradients. A ratio above 1 means that oneDNN is faster; the
limits of ``stateline.ops.linear`` follow from these ratios.
"""

import argparse
import time
from functools import partial

import torch

from stateline.bench.timing import interleave

WIDTHS = ["64:64", "64:256", "128:512", "256:256", "256:768", "512:2048"]


@torch.inference_mode()
def main() -> None:
    """Print the ratios, by rows and widths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--widths", nargs="+", default=WIDTHS, help="entries in:out")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each library")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("rows  widths     multiplications  MKL us  oneDNN us  MKL / oneDNN")
    for widths in options.widths:
        d_in, d_out = map(int, widths.split(":"))
        weight = torch.randn(d_out, d_in)
        for rows in options.rows:
            x = torch.randn(rows, d_in)
            calls = {
                "mkl": partial(torch.nn.functional.linear, x, weight),
                "onednn": partial(
                    torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""
                ),
            }
            timed = interleave(calls, seconds=options.seconds, clock=time.process_time)
            mkl, onednn = (1e6 * timed[name].median for name in calls)
            work = rows * d_in * d_out
            print(
                f"{rows:5} {widths:>9} {work:17,} {mkl:8.1f} {onednn:9.1f} {mkl / onednn:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
