"""The plain recurrences of flash-linear-attention, from a checkout, as a backend of our ops.

With :func:`stateline.ops.use_backend` our layers compute by them, so both implementations can be
timed and compared in whole layers. Its Triton kernels need a GPU; these functions run anywhere.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from stateline.errors import InputError
from stateline.ops import OPS, DeltaSignals, GatedDeltaSignals, LinearSignals, register_backend

BACKEND = "fla_naive"

LAYERS = (
    "gated_delta_net",
    "gated_linear_attention",
    "hgrn2",
    "kimi_delta_attention",
    "lightning_attention",
    "mamba2",
    "retention",
    "rwkv7",
)
"""Our layers whose recurrence flash-linear-attention has."""

CHUNK = 32
"""Chunk length of the generalised delta rule, as in the checkout's function."""


def register(folder: Path) -> None:
    """Add the backend to the ops that it can compute; ``auto`` prefers all others to it.

    Raises:
        InputError: If the folder is no checkout.
        ImportError: If one of its modules cannot be imported; they need einops.
    """
    naive = {name: _module(folder, name) for name in ("gla", "simple_gla", "gated_delta_rule")}
    dplr = _module(folder, "generalized_delta_rule/dplr")

    def linear_attention(x: LinearSignals, state: Tensor) -> Any:
        q, k, v, log_decay = x.with_own_keys()
        if x.decays_by_entry:
            q = q * q.shape[-1] ** 0.5  # the function divides by this root
            return naive["gla"].naive_recurrent_gla(q, k, v, log_decay, state, True)
        run = _by_length(naive["simple_gla"], "simple_gla", v.shape[1])
        given = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        return run(q, k, v, log_decay, **given)

    def delta_rule(x: DeltaSignals, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, a, b = (t.transpose(1, 2) for t in x)
        whole = v.shape[2] % CHUNK == 0
        run = dplr.dplr_chunkwise if whole else dplr.dplr_recurrence
        y, after = run(q * q.shape[-1] ** 0.5, k, v, a, b, log_decay, state, True)
        return y.transpose(1, 2), after

    def gated_delta_rule(x: GatedDeltaSignals, state: Tensor) -> Any:
        run = _by_length(naive["gated_delta_rule"], "gated_delta_rule", x.v.shape[1])
        given = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        return run(x.q, x.k, x.v, g=x.log_decay, beta=x.beta, **given)

    unregister()
    for run in (linear_attention, delta_rule, gated_delta_rule):
        functions = {run.__name__: run, f"{run.__name__}_step": _one_token(run)}
        register_backend(run.__name__, BACKEND, SimpleNamespace(**functions), before="reference")


def unregister() -> None:
    """Remove the backend from all ops."""
    for op in OPS.values():
        if BACKEND in op.backends:
            op.remove(BACKEND)


def _by_length(module: ModuleType, name: str, length: int) -> Any:
    """The checkout's function for chunks, or its recurrent one for a single token."""
    return getattr(module, f"naive_{'chunk' if length > 1 else 'recurrent'}_{name}")


def _one_token(run: Any) -> Any:
    """The function of sequences, called with one token."""

    def step(x: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        y, after = run(type(x)(*(t[:, None] for t in x)), state)
        return y[:, 0], after

    return step


def _module(folder: Path, name: str) -> ModuleType:
    """A module of plain functions, without its package, which imports Triton."""
    file = folder / "fla" / "ops" / name / "naive.py"
    if not file.is_file():
        raise InputError(f"{folder} is no checkout of flash-linear-attention: it has no {file}")
    found = spec_from_file_location(f"fla_naive_{Path(name).name}", file)
    if found is None or found.loader is None:
        raise ImportError(f"cannot read {file}")
    module = module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module
