"""Check the law of sequence layers, parallel = chunks = steps, or show the backends of the ops."""

import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from stateline.devices import add_device_option, resolve_device
from stateline.errors import InputError

if TYPE_CHECKING:
    import torch

    from stateline.layers import AnyLayer


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    parser.add_argument(
        "names",
        nargs="*",
        type=str,
        help="layers, patterns, folders with a model, or hf:FOLDER for a causal language model of "
        "transformers; by default every layer and wrapper",
    )
    parser.add_argument("--d_model", type=int, default=16, help="width to check at")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="check in float32 instead of float64: largest error 1e-4 instead of 1e-9, for hf: "
        "1e-3 instead of 1e-4",
    )
    parser.add_argument(
        "--backends",
        action="store_true",
        help="show the backends of each op, why some cannot run here, and which ones auto chooses",
    )
    add_device_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print a table per layer and return 1 if any breaks the law, or print the backends."""
    given = parser.parse_args(arguments)

    import torch

    from stateline.hf_check import HUGGING_FACE, ModelReport, check_model, load_hugging_face
    from stateline.layers import ATTENTION_WRAPPERS, LAYERS, NOT_CAUSAL, WRAPPERS
    from stateline.layers.law import LawReport, check_layer

    device = resolve_device(given.device)
    if given.backends:
        _print_backends(device)
        return 0
    torch.set_num_threads(1)  # the tensors are too small for threads
    names = given.names or [
        *LAYERS,
        *(
            f"{w}({'attention' if w in ATTENTION_WRAPPERS else 'h3 attention'})"
            for w in WRAPPERS
            if w not in NOT_CAUSAL
        ),
    ]
    dtype = torch.float32 if given.float32 else torch.float64
    folders = [name for name in names if name.startswith(HUGGING_FACE)]
    layers = [name for name in names if name not in folders]
    stacks = {name: _layer(name, given.d_model).to(device) for name in layers}
    reports: list[LawReport | ModelReport] = []
    for name, stack in stacks.items():
        reports.append(check_layer(stack, dtype=dtype, name=name))
        print(reports[-1], flush=True)
    for name in folders:
        model = load_hugging_face(name.removeprefix(HUGGING_FACE), device=device)
        reports.append(check_model(model, dtype=dtype, name=name))
        print(reports[-1], flush=True)
    broken = [report.name for report in reports if not report.ok]
    print(
        f"\n{len(reports)} checked, " + (f"broken: {', '.join(broken)}" if broken else "all hold")
    )
    return 1 if broken else 0


def _layer(name: str, d_model: int) -> "AnyLayer":
    """The stack of a pattern, or the model in a folder."""
    from stateline.models.build import build_stack
    from stateline.models.presets import configure

    if name.endswith(".py"):
        raise InputError(
            f"{name} is a file of code: give it with --import, and name the layer that it registers"
        )
    if os.path.isdir(name):
        from stateline.generate import load_run
        from stateline.runs.folder import check_imports

        check_imports(Path(name))
        return load_run(name)[0]
    return build_stack(configure(name, vocab_size=1, d_model=d_model))


def _print_backends(device: "torch.device") -> None:
    from stateline.ops import OPS

    print(f"Backends on {device} in order of preference, and where auto chooses them: in")
    print("training, at inference, or in both, for inputs of each dtype and of shape")
    print("(4, 1024, 64).\n")
    titles = ("op", "backend", *_DTYPES, "here")
    rows = [titles, *(row for name in sorted(OPS) for row in _rows(name, device))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles) - 1)]
    indent = sum(widths) + 2 * len(widths)
    for *cells, here in rows:
        left = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        room = max(16, get_terminal_size((120, 0)).columns - indent)
        print(left + f"\n{' ' * indent}".join(textwrap.wrap(here, room)))


_DTYPES = ("float32", "bfloat16", "float64")


def _rows(name: str, device: "torch.device") -> Iterator[tuple[str, ...]]:
    """For each backend of an op: where auto chooses it, and the reasons why it cannot run."""
    import torch

    from stateline.ops import OPS
    from stateline.ops.dispatch import tensors_of
    from stateline.ops.op import Sizes

    chosen: dict[tuple[str, str], list[str]] = {}
    why_not: dict[str, dict[str, None]] = {backend: {} for backend in OPS[name].backends}
    for dtype in _DTYPES:
        example = OPS[name].example(Sizes(4, 1024, 64, device, getattr(torch, dtype)))
        for mode in ("training", "inference"):
            for tensor in tensors_of(example.inputs):
                if tensor.is_floating_point():
                    tensor.requires_grad_(mode == "training")
            reasons = OPS[name].reasons(example.function or name, *example.inputs)
            first = next(backend for backend, reason in reasons.items() if not reason)
            chosen.setdefault((first, dtype), []).append(mode)
            for backend, reason in reasons.items():
                why_not[backend] |= {reason: None} if reason else {}
    for index, backend in enumerate(OPS[name].backends):
        modes = [chosen.get((backend, dtype), []) for dtype in _DTYPES]
        cells = ("both" if len(mode) == 2 else "".join(mode) or "-" for mode in modes)
        yield (
            name if index == 0 else "",
            backend,
            *cells,
            "; ".join(why_not[backend]) or "can run",
        )
