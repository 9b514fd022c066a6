"""How fast a model trains and decodes on one core of this machine.

One thread: more of them wait for each other longer than they work as soon as anything else runs.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from stateline.layers.derived import Memory, remembering
from stateline.models.make import AnyModel
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer

SECONDS = 0.7
"""Time to spend on one figure, beyond the first call and at least three more."""

TOKENS_PER_BATCH = 4096
"""Tokens of a training step that is timed, whatever their arrangement."""

DECODE_STEPS = 32
"""Tokens decoded between two looks at the clock; each time from a copy of the same state."""


def train_tokens_per_second(model: AnyModel, length: int) -> float:
    """Median speed of a training step: forward, backward, update.

    Args:
        model: Its weights are changed.
        length: Tokens in a row; a batch has as many rows as make 4,096 tokens, at least one.
    """
    batch_size = max(1, TOKENS_PER_BATCH // length)
    tokens = model.example_input(batch_size, length)
    targets = torch.randint(model.config.n_outputs, (batch_size, length))
    optimizer = make_optimizer(model, TrainConfig())
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    with _one_thread():
        return targets.numel() / _median_seconds(step)


@torch.inference_mode()
def decode_tokens_per_second(model: AnyModel, context: int) -> float:
    """Median speed of decoding one token after the other, for one sequence.

    Args:
        model: The model.
        context: Tokens that the state has seen before.
    """
    model.eval()
    token = model.example_input(1, 1)[:, 0]
    state: Any = model.init_state(1, capacity=DECODE_STEPS)
    for piece in model.example_input(1, context).split(1024, dim=1):
        _, state = model.forward_chunk(piece, state)

    memory: Memory = {}

    def decode() -> None:
        donated = pytree.tree_map(torch.clone, state)
        with remembering(memory):
            for _ in range(DECODE_STEPS):
                model.step_(token, donated)

    with _one_thread():
        return DECODE_STEPS / _median_seconds(decode)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _median_seconds(run: Callable[[], None]) -> float:
    """Median time of a call, after one that is not counted."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
