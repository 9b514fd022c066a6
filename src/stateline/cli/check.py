"""Check the law of sequence layers: parallel = chunks = steps, and all that follows from it."""

from collections.abc import Sequence

from jsonargparse import ArgumentParser


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "names", nargs="*", type=str, help="layers or patterns; by default every layer and wrapper"
    )
    parser.add_argument("--d_model", type=int, default=16, help="width to check at")
    parser.add_argument(
        "--float32", action="store_true", help="check in float32 (1e-4) in place of float64 (1e-9)"
    )
    parser.add_argument(
        "--backends", action="store_true", help="tell which implementation of each op runs"
    )


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print a table per layer; 1 if any breaks the law."""
    given = parser.parse_args(arguments)

    import torch

    from stateline.layers import ATTENTION_WRAPPERS, LAYERS, WRAPPERS
    from stateline.layers.law import check_layer
    from stateline.models.build import build_stack
    from stateline.models.config import ModelConfig

    if given.backends:
        _print_backends()
        return 0
    torch.set_num_threads(1)  # the tensors are small, and threads would wait for each other
    names = given.names or [
        *LAYERS,
        *(f"{w}({'attention' if w in ATTENTION_WRAPPERS else 'h3 attention'})" for w in WRAPPERS),
    ]
    dtype = torch.float32 if given.float32 else torch.float64
    stacks = {
        name: build_stack(ModelConfig(name, vocab_size=1, d_model=given.d_model)) for name in names
    }
    reports = []
    for name, stack in stacks.items():
        reports.append(check_layer(stack, dtype=dtype, name=name))
        print(reports[-1], flush=True)
    broken = [report.name for report in reports if not report.ok]
    print(
        f"\n{len(reports)} checked, " + (f"broken: {', '.join(broken)}" if broken else "all hold")
    )
    return 1 if broken else 0


def _print_backends() -> None:
    from stateline.ops import OPS

    width = max(map(len, OPS)) + 2
    for op, backends in OPS.items():
        first, *others = backends
        also = f" (also there: {', '.join(others)})" if others else ""
        print(f"{op:<{width}}{first}: the fastest of its backends that runs here{also}")
