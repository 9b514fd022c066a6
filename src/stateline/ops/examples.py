"""Calls of every op as layers make them, to show which backend would run them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, WIDTH, HEADS, MODES = 4, 1024, 64, 4, 32
Make = Callable[..., Tensor]


def example_call(op: str, dtype: torch.dtype, device: torch.device) -> tuple[str, tuple[Any, ...]]:
    """Function and inputs of a typical call in a model: whole sequences, as in training.

    Args:
        op: Name of the op.
        dtype: Dtype of the signals. Parameters and states of recurrences are at least float32.
        device: Where the tensors are.

    Returns:
        Name of the function, and the arguments as backends take them.
    """
    precise = torch.promote_types(dtype, torch.float32)

    def signal(*shape: int) -> Tensor:
        return torch.zeros(BATCH, LENGTH, *(shape or (WIDTH,)), dtype=dtype, device=device)

    def weight(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=precise, device=device)

    function = "mimo_ssm_chunk" if op == "mimo_ssm" else op
    return function, _CALLS[op](signal, weight)


def _heads(signal: Make) -> tuple[Tensor, ...]:
    return (signal(HEADS, WIDTH // HEADS),) * 3


def _modes(weight: Make) -> tuple[Tensor, ...]:
    return (weight(WIDTH, MODES, 2),) * 3


def _memory(weight: Make) -> Tensor:
    return weight(BATCH, HEADS, WIDTH // HEADS, WIDTH // HEADS)


def _gates(weight: Make) -> tuple[Tensor, ...]:
    rows = 4 * WIDTH
    return (*(weight(rows, WIDTH),) * 2, *(weight(rows),) * 2)


_CALLS: dict[str, Callable[[Make, Make], tuple[Any, ...]]] = {
    "attention": lambda signal, _: (*_heads(signal), None, None, None),
    "cross_entropy": lambda signal, weight: (
        weight(BATCH * LENGTH, WIDTH),
        signal(1)[..., 0].flatten().long(),
    ),
    "diagonal_ssm": lambda signal, weight: (signal(), *_modes(weight)),
    "discretize": lambda _, weight: (
        weight(WIDTH),
        *(weight(WIDTH, MODES),) * 2,
        weight(WIDTH, MODES, 2),
        "zoh",
    ),
    "dplr_ssm": lambda signal, weight: (
        signal(),
        weight(WIDTH),
        weight(WIDTH, MODES, 2),
        *_modes(weight),
    ),
    "feed_forward": lambda _, weight: (
        weight(BATCH, LENGTH, WIDTH),
        weight(4 * WIDTH, WIDTH),
        weight(4 * WIDTH),
        weight(WIDTH, 4 * WIDTH),
        weight(WIDTH),
    ),
    "fft_conv": lambda signal, weight: (signal(), weight(WIDTH, LENGTH)),
    "gated_delta_rule": lambda signal, weight: (
        *_heads(signal),
        *(signal(HEADS),) * 2,
        _memory(weight),
    ),
    "gelu": lambda signal, _: (signal(),),
    "h3_core": lambda signal, weight: (
        *(signal(),) * 3,
        weight(WIDTH, 2 * MODES),
        *_modes(weight),
        weight(WIDTH),
    ),
    "linear_attention": lambda signal, weight: (*_heads(signal), None, _memory(weight)),
    "local_attention": lambda signal, _: (*_heads(signal), 128, None, None, None, None, 1),
    "lstm": lambda _, weight: (
        weight(BATCH, LENGTH, WIDTH),
        *(weight(BATCH, WIDTH),) * 2,
        *_gates(weight),
    ),
    "mimo_ssm": lambda signal, weight: (
        signal(),
        weight(MODES, 2),
        weight(MODES, WIDTH, 2),
        weight(WIDTH, MODES, 2),
        weight(BATCH, MODES, 2),
    ),
    "rotary": lambda signal, weight: (
        _heads(signal)[0],
        *(weight(1, LENGTH, WIDTH // HEADS // 2),) * 2,
    ),
    "selective_scan": lambda signal, weight: (
        signal(),
        weight(BATCH, LENGTH, WIDTH),
        weight(WIDTH, 16),
        *(signal(1, 16),) * 2,
        weight(BATCH, WIDTH, 16),
    ),
    "shift_taps": lambda _, weight: (*(weight(WIDTH, MODES),) * 2, weight(WIDTH)),
    "short_conv": lambda signal, weight: (signal(), weight(WIDTH, 4)),
}
