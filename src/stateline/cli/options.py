"""Options that several commands have, and what their values stand for."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stateline.cli.parser import Parser
from stateline.devices import DTypeName, resolve_device, resolve_dtype
from stateline.errors import InputError
from stateline.files import model_path
from stateline.runs.folder import check_imports

if TYPE_CHECKING:
    import torch

    from stateline.compare.engine import Engine
    from stateline.compare.storage import Mirror
    from stateline.data import Tokenizer
    from stateline.models.language_model import LanguageModel

StateDType = Literal["float32", "bfloat16", "float16"]
"""Precisions in which states can be kept between steps."""

KEY = "STATELINE_KEY"
"""The environment variable that may hold the key of a server."""

_ENGINES = {
    "address": ("ray",),
    "gpus_per_job": ("ray", "slurm"),
    "cpus_per_job": ("ray", "slurm"),
    "retries": ("ray",),
    "slurm": ("slurm",),
}
"""Engines by the options that not all of them have."""


def add_device(parser: Parser) -> None:
    """Add ``--device``."""
    parser.option("device", str, "auto", "auto (a GPU if there is one), cpu, cuda, cuda:N or mps")


def add_dtype(parser: Parser) -> None:
    """Add ``--dtype``."""
    parser.option("dtype", DTypeName, None, "precision of the weights; by default as saved")


def add_device_and_dtype(parser: Parser) -> None:
    """Add ``--device`` and ``--dtype``; :func:`place` gives their values."""
    add_device(parser)
    add_dtype(parser)


def add_weights(parser: Parser) -> None:
    """Add ``--weights``, for :func:`open_model`."""
    about = "int8 rounds large matrices to integers of 8 bits, which decoding reads faster"
    parser.option("weights", Literal["int8"], None, about)


def place(given: Any) -> "tuple[torch.device, torch.dtype | None]":
    """The device and the precision that were asked for."""
    return resolve_device(given.device), resolve_dtype(given.dtype)


def user_folder(path: str) -> Path:
    """The folder of a model, a run or a checkpoint, after a check that its code was imported."""
    folder = model_path(path)
    check_imports(folder)
    return folder


def open_model(
    given: Any, path: str = "", tokenizer: str | None = None
) -> "tuple[LanguageModel, Tokenizer]":
    """The language model in ``RUN`` or in another folder, as the options say, and its tokenizer."""
    folder = user_folder(path or given.run)
    from stateline.generate import load_run

    device, dtype = place(given)
    weights = given.get("weights")
    return load_run(folder, device=device, dtype=dtype, tokenizer=tokenizer, weights=weights)


def add_key(parser: Parser, about: str) -> None:
    """Add ``--key``; :func:`key_of` also looks at the environment."""
    parser.option("key", str, None, f"{about}; or set {KEY}")


def key_of(given: Any) -> str | None:
    """The key of a server; ``None`` if there is none.

    Raises:
        InputError: If it is empty, such as an unset shell variable: the server would be open.
    """
    if given.key == "":
        raise InputError("--key is empty: give a key, or leave it out for a server without one")
    return given.key or os.environ.get(KEY) or None


def add_budget(parser: Parser) -> None:
    """Add ``--budget``, a list for :func:`stateline.reports.decision.read_budget`."""
    parser.option(
        "budget",
        list[str],
        [],
        "decide among models within limits on state, flops, decode, prefill or train, such as "
        '"state<=64KiB" "decode>=1k", or "state@4096<=64KiB" at a length',
        metavar="LIMIT",
    )


def add_tracker(parser: Parser) -> None:
    """Add ``--tracker``, for :func:`stateline.compare.trackers.tracked`."""
    parser.option(
        "tracker",
        str,
        None,
        "wandb, mlflow, or MODULE:FUNCTION or FILE.py:FUNCTION, called with run, step and scalars",
    )


def add_engine(parser: Parser) -> None:
    """Add ``--engine`` and the options of engines; :func:`make_engine` makes the engine."""
    option = parser.option
    option(
        "workers",
        int,
        None,
        "models trained at a time, each in its own process; by default as many as there are "
        "cores for their threads, or one per GPU; 0 trains one after the other in this process",
    )
    option("threads", int, 1, "threads of each model on the CPU")
    option("workers_per_gpu", int, 1, "models that share a GPU; above 1 for small models")
    option(
        "engine",
        Literal["local", "ray", "slurm"],
        "local",
        "where models are trained: on this machine, on a Ray cluster, or by Slurm",
    )
    option(
        "address",
        str,
        None,
        "for ray: the cluster, auto or HOST:6379; without it, Ray starts on this machine",
    )
    option(
        "gpus_per_job",
        float,
        None,
        "for ray, slurm: by default 1 if a node has a GPU (for slurm, in the partition), else 0",
    )
    option("cpus_per_job", int, None, "for ray, slurm: by default 1")
    option(
        "slurm",
        list[str],
        None,
        "for slurm: parameters of submitit, such as slurm_partition=gpu timeout_min=600",
        metavar="NAME=VALUE",
    )
    option("retries", int, None, "for ray: restarts of a job whose node was lost; by default 3")


def make_engine(given: Any, mirror: "Mirror | None" = None) -> "Engine":
    """The engine that the options ask for; with ``mirror``, results are kept in a storage."""
    options = {name: given[name] for name in _ENGINES if given[name] is not None}
    for name in options:
        if given.engine not in _ENGINES[name]:
            raise InputError(f"--{name} is an option of --engine {' or '.join(_ENGINES[name])}")
    if given.engine == "ray":
        from stateline.compare.cluster import Ray

        return Ray(**options, mirror=mirror)
    if given.engine == "slurm":
        from stateline.compare.slurm import Slurm

        return Slurm(options=_parameters(options.pop("slurm", [])), **options)
    from stateline.compare.pool import local

    names = ("workers", "threads", "workers_per_gpu")
    return local(given.device, **{name: given[name] for name in names})


def _parameters(texts: Sequence[str]) -> dict[str, str | int]:
    """Parameters of submitit; texts of digits become integers."""
    found: dict[str, str | int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and value):
            raise InputError(f"--slurm needs NAME=VALUE, got {text!r:.60}")
        found[name] = int(value) if value.isdecimal() else value
    return found
