"""Check the law of layers, models and servers: the same in every mode, or show the backends."""

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace

from stateline.devices import add_device_option, resolve_device
from stateline.errors import InputError
from stateline.files import write_text

KEY = "STATELINE_KEY"
"""The environment variable that may hold the key of a server."""

if TYPE_CHECKING:
    import torch

    from stateline.layers import AnyLayer


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    parser.add_argument(
        "names",
        nargs="*",
        type=str,
        help="layers, patterns, folders with a model, hf:FOLDER for a causal language model of "
        "transformers, or http://HOST/v1 for a server; by default every layer and wrapper",
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
    parser.add_argument(
        "--model", type=str | None, default=None, help="for a server: the name of the model"
    )
    parser.add_argument(
        "--key", type=str | None, default=None, help=f"for a server: its key; or set {KEY}"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="for a server: of the prompts; another for each check. For --state_dtype: of the text",
    )
    parser.add_argument(
        "--state_dtype",
        nargs="+",
        type=Literal["bfloat16", "float16", "int8"],
        default=None,
        help="show how far a state in this precision drifts, by length",
    )
    parser.add_argument(
        "--length", type=int, default=4096, help="for --state_dtype: tokens that are read"
    )
    parser.add_argument(
        "--json", type=str | None, default=None, help="for servers: write the results to this file"
    )
    add_device_option(parser)


def run(arguments: Sequence[str], parser: ArgumentParser) -> int:
    """Print a table per layer and return 1 if any breaks the law, or print the backends."""
    given = parser.parse_args(arguments)

    import torch

    from stateline.hf_check import HUGGING_FACE, ModelReport, check_model, load_hugging_face
    from stateline.layers import ATTENTION_WRAPPERS, LAYERS, NOT_CAUSAL, WRAPPERS
    from stateline.layers.law import LawReport, check_layer
    from stateline.server_check import ServerReport, check_server

    device = resolve_device(given.device)
    if given.backends:
        _print_backends(device)
        return 0
    torch.set_num_threads(1)  # the tensors are too small for threads
    if given.state_dtype is not None:
        _print_drift(given, device)
        return 0
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
    urls = [name for name in names if name.startswith(("http://", "https://"))]
    layers = [name for name in names if name not in folders and name not in urls]
    if given.json is not None and not urls:
        raise InputError("--json holds the results of servers: give http://HOST/v1")
    stacks = {name: _layer(name, given.d_model).to(device) for name in layers}
    reports: list[LawReport | ModelReport | ServerReport] = []
    for name, stack in stacks.items():
        reports.append(check_layer(stack, dtype=dtype, name=name))
        print(reports[-1], flush=True)
    for name in folders:
        model = load_hugging_face(name.removeprefix(HUGGING_FACE), device=device)
        reports.append(check_model(model, dtype=dtype, name=name))
        print(reports[-1], flush=True)
    key = given.key or os.environ.get(KEY) or None
    served = []
    for url in urls:
        served.append(check_server(url, given.model, key=key, seed=given.seed))
        print(served[-1], flush=True)
    if given.json is not None:
        results = json.dumps([report.as_json() for report in served], indent=2)
        write_text(Path(given.json), results)
    reports += served
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


def _print_drift(given: Namespace, device: "torch.device") -> None:
    """A table for each model: what rounding its state changes, by length."""
    import torch

    from stateline.generate import drift, load_run
    from stateline.models.language_model import LanguageModel
    from stateline.models.presets import configure
    from stateline.runs.folder import check_imports

    if not given.names:
        raise InputError("--state_dtype needs a pattern or the folder of a model")
    for name in given.names:
        if os.path.isdir(name):
            check_imports(Path(name))
            model = load_run(name, device=device)[0]
        else:
            torch.manual_seed(given.seed)
            config = configure(name, vocab_size=256, d_model=given.d_model)
            model = LanguageModel(config).eval().to(device)
        read = drift(model, given.state_dtype, length=given.length, seed=given.seed)
        for place, found in enumerate(read):
            if place == 0:
                print(f"{name}: change of the next token's distribution (and of the state)")
                print(f"{'tokens':>10}" + "".join(f"{dtype:>19}" for dtype in given.state_dtype))
            cells = (
                f"{found.answers[dtype]:9.1e} ({found.state[dtype]:.1e})"
                for dtype in given.state_dtype
            )
            print(f"{found.length:>10,}" + "".join(f"{cell:>19}" for cell in cells), flush=True)


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
