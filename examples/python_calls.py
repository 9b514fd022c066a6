"""Count the calls of Python functions of this package in two fixed cases.

Run it: python examples/python_calls.py
or:     python examples/python_calls.py --list

The cases are ``forward`` of an H3 layer on 33 tokens without gradient, and one token of a session
with a model of four layers. Both have run before, so kernels are compiled and signatures known.
``--list`` prints every function by the number of its calls.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import stateline
from stateline import LanguageModel, ModelConfig
from stateline.generate import Session, prefill
from stateline.layers import H3

PACKAGE = Path(stateline.__file__).parent


def forward() -> Callable[[], object]:
    """H3 on two rows of 33 tokens, without gradient."""
    layer, x = H3(32), torch.randn(2, 33, 32)
    return lambda: layer(x)


def token() -> Callable[[], object]:
    """One token of a model of four layers, two of them attention."""
    config = ModelConfig("h3 attention h3 attention", vocab_size=256, d_model=64)
    model = LanguageModel(config).eval()
    return Session(model, prefill(model, torch.zeros(1, 8, dtype=torch.int64))).step


CASES = {"forward": forward, "token": token}


@torch.no_grad()
def calls(name: str) -> Counter[str]:
    """How often each function of the package is called in a case."""
    run, found = CASES[name](), Counter[str]()
    for _ in range(3):
        run()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            found[f"{path.relative_to(PACKAGE)}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    """Print the numbers of calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function")
    listed = parser.parse_args().list
    for name in CASES:
        found = calls(name)
        print(f"{name}: {found.total()} calls")
        for function, number in found.most_common() if listed else ():
            print(f"{number:6} {function}")


if __name__ == "__main__":
    main()
