"""Measure what the kernels of single ops gain in whole updates, or whole tokens, of a model.

Run it: python examples/kernel_gains.py "attention(position=rope)*2" 64 32 64 attention pointwise

It trains a language model (256 letters, AdamW, tied embeddings) on random tokens. The arguments are
pattern, width, rows, length, and ops. Updates alternate: one with the backends that ``auto``
chooses, then one for each argument with that op by PyTorch (``--backend``); ``+`` joins two ops.
The table shows the median processor time of an update and the median of the ratios of neighbouring
updates: above 1, the kernel gains. ``linear`` stands for linear maps by MKL alone, ``chunks`` for
linear attention without chunks of tokens, ``rms_norm`` and ``swiglu`` (with ``--norm rms
--feed-forward swiglu``) for these functions, and ``--nanogpt FOLDER`` adds the model of a checkout
of karpathy/nanoGPT. With ``--tokens`` a round decodes eight tokens after a prompt of the length.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from stateline import LanguageModel, ModelConfig
from stateline.allocator import keep_freed_memory
from stateline.bench.peers import find_trained
from stateline.generate import Session, prefill
from stateline.ops import rms_norm, swiglu, use_backend

WARM_UP = 2
"""Rounds that are not counted, in which kernels are compiled and memory is allocated."""


def updates(model: nn.Module, rows: int, length: int) -> Callable[[], float]:
    """A function that runs one update and returns its processor time in milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(256, (rows, length + 1))

    def update() -> float:
        started = time.process_time()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 1e3 * (time.process_time() - started)

    return update


def tokens(model: LanguageModel, rows: int, length: int) -> Callable[[], float]:
    """A function that decodes eight tokens and returns the processor time of one in milliseconds.

    The session keeps what follows from the weights, and so the kernels with which it is made.
    """
    session = Session(model.eval(), prefill(model, torch.randint(256, (rows, length))))
    session.step()

    def decode() -> float:
        started = time.process_time()
        for _ in range(8):
            session.step()
        return 1e3 * (time.process_time() - started) / 8

    return decode


PATCHES: dict[str, tuple[str, object]] = {
    "linear": ("stateline.ops.linear.mkl_is_slower", lambda: False),
    "chunks": ("stateline.ops.linear_attention.numba_backend.LEAST", math.inf),
    "rms_norm": ("stateline.layers.norm.rms_norm", partial(rms_norm, backend="torch")),
    "swiglu": ("stateline.layers.mixers.feed_forward.swiglu", partial(swiglu, backend="torch")),
}
"""What is not an op of its own, or one of several functions of an op, and how it is left out."""


def preferring(name: str, backend: str) -> Callable[[], AbstractContextManager[object]]:
    """A context in which some ops, joined by ``+``, run on another backend."""
    if name in PATCHES:
        return lambda: patch(*PATCHES[name])
    return lambda: use_backend(**dict.fromkeys(name.split("+"), backend))


def main(given: argparse.Namespace) -> None:
    """Print a line for each op."""
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    kinds = {"norm": given.norm, "feed_forward": given.feed_forward}
    sizes = {"vocab_size": 256, "d_model": given.d_model, "tie_embeddings": True}
    config = ModelConfig(given.pattern, **sizes, **kinds)
    model = LanguageModel(config)
    choices = {"auto": nullcontext, **{name: preferring(name, given.backend) for name in given.ops}}
    if given.tokens:
        runs = {}
        for name, choice in choices.items():
            with choice():
                runs[name] = tokens(model, given.rows, given.length)
    else:
        runs = dict.fromkeys(choices, updates(model, given.rows, given.length))
    if given.nanogpt:
        build = find_trained([f"nanogpt={given.nanogpt}"], [given.pattern])["nanogpt"]
        runs["nanogpt"] = updates(build(config, given.length), given.rows, given.length)
        choices["nanogpt"] = nullcontext
    times: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(WARM_UP + given.updates):
        for name, choice in choices.items():
            with choice():
                times[name].append(runs[name]())
    auto = times.pop("auto")[WARM_UP:]
    for name, own in times.items():
        other = own[WARM_UP:]
        gain = statistics.median(b / a for a, b in zip(auto, other, strict=True))
        print(
            f"{statistics.median(auto):8.3g}{statistics.median(other):8.3g}{gain:7.2f}x  {name} in "
            f"{given.pattern}, width {given.d_model}, {given.rows} x {given.length}",
            flush=True,
        )


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern")
    parser.add_argument("d_model", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--nanogpt", help="folder of a checkout")
    parser.add_argument("--norm", default="layer", help="rms for rms_norm")
    parser.add_argument("--feed-forward", default="gelu", help="swiglu for swiglu")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--updates", type=int, default=25, help="number that is measured")
    parser.add_argument("--tokens", action="store_true", help="time tokens in place of updates")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
