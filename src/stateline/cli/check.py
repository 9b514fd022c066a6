"""Check that layers, models and servers give the same results in every mode; show backends."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import Namespace

from stateline.cli.console import plain_table, wide_console
from stateline.cli.options import add_device, add_key, key_of, user_folder
from stateline.cli.parser import Parser
from stateline.devices import resolve_device
from stateline.errors import InputError
from stateline.files import write_text

if TYPE_CHECKING:
    import torch

    from stateline.layers import AnyLayer
    from stateline.models.language_model import LanguageModel


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.argument(
        "names",
        "layers, patterns, folders with a model, hf:FOLDER for a causal language model of "
        "transformers, or http://HOST/v1 for a server; by default every layer and wrapper",
        nargs="*",
        default=[],
    )
    option, switch = parser.option, parser.switch
    option("d_model", int, 16, "width to check at")
    switch(
        "float32",
        "check in float32 instead of float64: largest error 1e-4 instead of 1e-9, for hf: 1e-3 "
        "instead of 1e-4",
    )
    switch("backends", "show the backends of each op, what auto chooses, and why others cannot run")
    option("model", str, None, "for a server: the name of the model")
    add_key(parser, "for a server: its key")
    about = "seed of the input, and of the prompts for a server (use a new one for each check)"
    option("seed", int, 0, about)
    about = "show how far a state in this precision drifts, by length"
    option("state_dtype", list[Literal["bfloat16", "float16", "int8"]], None, about)
    about = (
        "tokens that are read: by default 4096 for --state_dtype and 40 for hf:; for layers 300 "
    )
    option("length", int, None, about + "in one call, or 0 for no long sequence")
    about = "for layers: lengths of the chunks of the short sequence, by default 5, 1, 3, 4"
    option("chunks", list[int], None, about)
    option("json", str, None, "for servers: write the results to this file")
    add_device(parser)


def run(arguments: Sequence[str], parser: Parser) -> int:
    """Print a table per layer and return 1 if any breaks the law, or print the backends."""
    given = parser.parse_args(arguments)

    import torch

    from stateline.hf_check import HUGGING_FACE, ModelReport, check_model, load_hugging_face
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
    names = given.names or _all_layers()
    dtype = torch.float32 if given.float32 else torch.float64
    folders = [name for name in names if name.startswith(HUGGING_FACE)]
    urls = [name for name in names if name.startswith(("http://", "https://"))]
    layers = {
        name: _layer(name, given.d_model).to(device)
        for name in names
        if name not in folders and name not in urls
    }
    _check_used(given, layers=bool(layers), folders=bool(folders), urls=bool(urls))

    def checked() -> Iterator[LawReport | ModelReport | ServerReport]:
        for name, layer in layers.items():
            keywords = {"seed": given.seed, **_set(given, "length", "chunks")}
            yield check_layer(layer, dtype=dtype, name=name, **keywords)
        for name in folders:
            model = load_hugging_face(name.removeprefix(HUGGING_FACE), device=device)
            keywords = {"seed": given.seed, **_set(given, "length")}
            yield check_model(model, dtype=dtype, name=name, **keywords)
        for url in urls:
            yield check_server(url, given.model, key=key_of(given), seed=given.seed)

    reports = []
    for report in checked():
        reports.append(report)
        print(report, flush=True)
    if given.json is not None:
        served = [report.as_json() for report in reports if isinstance(report, ServerReport)]
        write_text(Path(given.json), json.dumps(served, indent=2))
    broken = [report.name for report in reports if not report.ok]
    verdict = f"broken: {', '.join(broken)}" if broken else "all hold"
    print(f"\n{len(reports)} checked, {verdict}")
    return 1 if broken else 0


def _check_used(given: Namespace, *, layers: bool, folders: bool, urls: bool) -> None:
    """Refuse options that have no effect on what is checked."""
    if given.json is not None and not urls:
        raise InputError("--json holds the results of servers: give http://HOST/v1")
    if given.chunks is not None and not layers:
        raise InputError("--chunks is for layers: give a pattern or the folder of a model")
    if given.length is not None and not layers and not folders:
        raise InputError("--length is not for servers: give a pattern or the folder of a model")


def _set(given: Namespace, *names: str) -> dict[str, Any]:
    """The options that are set; others have the defaults of the function that takes them."""
    return {name: given[name] for name in names if given[name] is not None}


def _all_layers() -> list[str]:
    """Every layer, and every wrapper around layers that it takes."""
    from stateline.layers import ATTENTION_WRAPPERS, LAYERS, NOT_CAUSAL, WRAPPERS

    cores = {w: "attention" if w in ATTENTION_WRAPPERS else "h3 attention" for w in WRAPPERS}
    return [*LAYERS, *(f"{name}({cores[name]})" for name in WRAPPERS if name not in NOT_CAUSAL)]


def _layer(name: str, d_model: int) -> "AnyLayer":
    """The stack of a pattern, or the model in a folder."""
    from stateline.models.build import build_stack
    from stateline.models.presets import configure

    if name.endswith(".py"):
        raise InputError(
            f"{name} is a file of code: give it with --import, and name the layer that it registers"
        )
    if os.path.isdir(name):
        return _saved(name)
    return build_stack(configure(name, vocab_size=1, d_model=d_model))


def _saved(folder: str) -> "LanguageModel":
    user_folder(folder)
    from stateline.generate import load_run

    return load_run(folder)[0]


def _print_drift(given: Namespace, device: "torch.device") -> None:
    """A table for each model: what rounding its state changes, by length."""
    import torch

    from stateline.generate import drift
    from stateline.models.language_model import LanguageModel
    from stateline.models.presets import configure

    if given.chunks is not None:
        raise InputError("--chunks has no effect with --state_dtype: leave one out")
    if not given.names:
        raise InputError("--state_dtype needs a pattern or the folder of a model")
    dtypes = given.state_dtype
    for name in given.names:
        if os.path.isdir(name):
            model = _saved(name)
        else:
            torch.manual_seed(given.seed)
            config = configure(name, vocab_size=256, d_model=given.d_model)
            model = LanguageModel(config).eval()
        heading = f"{name}: change of the next token's distribution (and of the state)\n"
        heading += f"{'tokens':>10}" + "".join(f"{dtype:>19}" for dtype in dtypes) + "\n"
        for found in drift(model.to(device), dtypes, seed=given.seed, **_set(given, "length")):
            cells = (f"{found.answers[own]:9.1e} ({found.state[own]:.1e})" for own in dtypes)
            line = f"{found.length:>10,}" + "".join(f"{cell:>19}" for cell in cells)
            print(heading + line, flush=True)
            heading = ""


def _print_backends(device: "torch.device") -> None:
    from stateline.ops import OPS

    print(f"Backends on {device} in order of preference, and where auto chooses them: in")
    print("training, at inference, or in both, for inputs of each dtype and of shape")
    print("(4, 1024, 64).\n")
    table = plain_table("op", "backend", *_DTYPES, "here", left=3 + len(_DTYPES))
    for name in sorted(OPS):
        for row in _rows(name, device):
            table.add_row(*row)
    wide_console().print(table, highlight=False)


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
        here = "; ".join(why_not[backend]) or "can run"
        yield "" if index else name, backend, *cells, here
