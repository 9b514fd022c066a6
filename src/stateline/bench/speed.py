"""How fast a model trains and decodes on its device; on the CPU, on one thread.

One thread, because several wait for each other more than they work once anything else runs.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from stateline.bench.timing import use_threads, waiter
from stateline.generate.session import PREFILL_CHUNK
from stateline.layers.derived import Memory, remembering
from stateline.models.factory import AnyModel
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer

SECONDS = 0.7
"""Time to spend on one measurement, after the first call; at least three calls are timed."""

TOKENS_PER_BATCH = 4096
"""Tokens of a timed training step, for any sequence length."""

DECODE_STEPS = 32
"""Tokens decoded between two readings of the clock, each time from a copy of the same state."""


def train_tokens_per_second(
    model: AnyModel, length: int, *, precision: Literal["float32", "bfloat16"] = "float32"
) -> float:
    """Median speed of a training step: forward, backward, update.

    Args:
        model: The model; its weights are changed.
        length: Tokens in a sequence; a batch has as many as make 4,096 tokens, at least one.
        precision: Precision of matrix products, as in training.
    """
    batch_size = max(1, TOKENS_PER_BATCH // length)
    inputs = model.example_input(batch_size, length)
    device = inputs.device
    targets = torch.randint(model.config.n_outputs, (batch_size, length), device=device)
    optimizer = make_optimizer(model, TrainConfig())
    lower: AbstractContextManager[object] = nullcontext()
    if precision == "bfloat16":
        lower = torch.autocast(device.type, torch.bfloat16)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        with lower:
            logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()

    with use_threads(1):
        return targets.numel() / _median_seconds(step, device)


@torch.inference_mode()
def decode_tokens_per_second(model: AnyModel, context: int) -> float:
    """Median speed of decoding one token after the other, for one sequence.

    Args:
        model: The model.
        context: Tokens already in the state.
    """
    model.eval()
    token = model.example_input(1, 1)[:, 0]
    state: Any = model.init_state(1, capacity=DECODE_STEPS)
    for chunk in model.example_input(1, context).split(PREFILL_CHUNK, dim=1):
        _, state = model.forward_chunk(chunk, state)

    memory: Memory = {}

    def decode() -> None:
        donated = pytree.tree_map(torch.clone, state)
        with remembering(memory):
            for _ in range(DECODE_STEPS):
                model.step_(token, donated)

    with use_threads(1):
        return DECODE_STEPS / _median_seconds(decode, token.device)


def _median_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Median time of a call until its work on the device is done; the first call is not timed."""
    wait = waiter(device)
    run()
    wait()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        started = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
