"""Batches whose rows are at different offsets inside a chunk."""

from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.layers.state import cat_states, select_rows

StateT = TypeVar("StateT")


def by_phase(
    advance: Callable[[Tensor, StateT, int], tuple[Tensor, StateT]],
    x: Float[Tensor, "batch length d_model"],
    state: StateT,
    phase: Int[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch length d_model"], StateT]:
    """Run the rows of each phase together, and restore their order.

    Reads the phases on the host, so it breaks the graph of ``torch.compile``.

    Args:
        advance: ``(x, state, phase) -> (y, state)`` for rows of one phase.
        x: Input of all rows.
        state: State of all rows.
        phase: Offset of each row in its chunk.

    Returns:
        Outputs and state of all rows.
    """
    phases = phase.tolist()
    if len(set(phases)) == 1:
        return advance(x, state, phases[0])
    outputs, states, order = [], [], []
    for place in sorted(set(phases)):
        rows = [row for row, its in enumerate(phases) if its == place]
        y, after = advance(x[rows], select_rows(state, rows), place)
        outputs.append(y)
        states.append(after)
        order += rows
    back = torch.tensor(order).argsort().to(x.device)
    return torch.cat(outputs)[back], select_rows(cat_states(states), back)
