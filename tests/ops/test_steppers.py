"""Steps that change states in place equal the steps that return new ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline import ops
from tests.ops import flat

BACKENDS = ["numba", "torch", "reference"]
ROWS, HEADS, MODES, TAPS = 3, 18, 5, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def modes(copies: int = HEADS) -> Tensor:
    return torch.stack([-normal(copies, MODES).exp(), 3 * normal(copies, MODES)], dim=-1)


Case = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Signals, weights and states of one token."""


def diagonal_case(readouts: int = 1, copies: int = HEADS) -> Case:
    outputs = readouts * HEADS
    weights = [modes(copies), normal(HEADS, MODES, 2), normal(outputs, MODES, 2), normal(outputs)]
    return [normal(ROWS, HEADS)], weights, [normal(ROWS, HEADS, MODES, 2)]


def h3_case(d_head: int = 1, readouts: int = 1, copies: int = HEADS) -> Case:
    width, (_, weights, _) = HEADS * d_head, diagonal_case(readouts, copies)
    states = [normal(ROWS, TAPS - 1, width), normal(ROWS, d_head, d_head, HEADS, MODES, 2)]
    return [normal(ROWS, width) for _ in "qkv"], [normal(width, TAPS), *weights], states


def filter_case(taps: int = TAPS) -> Case:
    return [normal(ROWS, HEADS)], [normal(taps, HEADS)], [normal(ROWS, taps - 1, HEADS)]


def diagonal_step(u: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    *weights, skip, state = rest
    y, after = flat.diagonal_ssm_step(u, *weights, state, backend="reference")
    return y + (skip.unflatten(0, (-1, HEADS)) * u[:, None]).flatten(1), after


def h3_step(*inputs: Tensor) -> tuple[Tensor, ...]:
    return flat.h3_core_step(*inputs, backend="reference")


def filter_step(u: Tensor, weights: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    reach = torch.cat([past, u[:, None]], dim=1)
    return (reach * weights).sum(dim=1), reach[:, 1:]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]], Case]] = {
    "diagonal": (flat.diagonal_ssm_stepper, diagonal_step, diagonal_case()),
    "diagonal, 2 readouts": (flat.diagonal_ssm_stepper, diagonal_step, diagonal_case(readouts=2)),
    "diagonal, shared": (flat.diagonal_ssm_stepper, diagonal_step, diagonal_case(copies=1)),
    "h3": (flat.h3_core_stepper, h3_step, h3_case()),
    "h3, 2 readouts": (flat.h3_core_stepper, h3_step, h3_case(readouts=2)),
    "h3, shared": (flat.h3_core_stepper, h3_step, h3_case(copies=1)),
    "h3, wide heads": (flat.h3_core_stepper, h3_step, h3_case(d_head=3, readouts=2)),
    "filter": (ops.short_conv_stepper, filter_step, filter_case()),
    "filter of one tap": (ops.short_conv_stepper, filter_step, filter_case(taps=1)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_steps_in_place_equal_steps(name: str, backend: str) -> None:
    make, step, (signals, weights, states) = CASES[name]
    stepper = make(*weights, backend=backend)
    here, there = [x.clone() for x in states], states
    for _ in range(3):
        y = stepper(*signals, *here)
        wanted, *there = step(*signals, *weights, *there)
        assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        assert_close(here, list(there), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["strided", "float32"])
def test_states_of_any_layout_and_precision_change_in_place(name: str, layout: str) -> None:
    make, step, (signals, weights, states) = CASES[name]
    if layout == "strided":
        here = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in states]
    else:
        here = [x.float() for x in states]
    y = make(*weights, backend="numba")(*signals, *here)
    wanted, *after = step(*signals, *weights, *states)
    assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    assert_close([x.double() for x in here], list(after), rtol=1e-5, atol=1e-5)


def scan_case() -> list[Tensor]:
    b, c, a = normal(ROWS, 2, 5), normal(ROWS, 2, 5), -normal(6, 5).exp()
    return [normal(ROWS, 6), normal(ROWS, 6).exp(), a, b, c, normal(ROWS, 6, 5)]


def lookup_case(groups: int = 4) -> list[Tensor]:
    q, k, v = normal(ROWS, groups, 5), normal(ROWS, groups, 5), normal(ROWS, 4, 7)
    return [q, k / 5, v, -normal(ROWS, 4).exp(), normal(ROWS, 4, 5, 7)]


def delta_case() -> list[Tensor]:
    *signals, state = lookup_case()
    return [*signals, normal(ROWS, 4).sigmoid(), state]


def entries_case() -> list[Tensor]:
    q, k, v, _, state = lookup_case()
    a = normal(ROWS, 4, 5) / 5
    return [q, k, v, -normal(ROWS, 4, 5).exp(), a, -a * normal(ROWS, 4, 1).sigmoid(), state]


RECURRENCES: dict[str, Callable[[], list[Any]]] = {
    "selective_scan": scan_case,
    "linear_attention": lambda: lookup_case(groups=2),
    "gated_delta_rule": delta_case,
    "delta_rule": entries_case,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_in_place_equals_the_definition(name: str, backend: str) -> None:
    step, step_ = getattr(flat, f"{name}_step"), getattr(flat, f"{name}_step_")
    *signals, state = RECURRENCES[name]()
    wanted, after = step(*signals, state, backend="reference")
    y, copy = step(*signals, state, backend=backend)
    assert_close((y, copy), (wanted, after), rtol=1e-12, atol=1e-12)
    wide = torch.stack([state, state], dim=-1)
    for here in (wide[..., 0], state):  # a view with gaps, and the state itself
        assert_close(step_(*signals, here, backend=backend), wanted, rtol=1e-12, atol=1e-12)
        assert_close(here, after, rtol=1e-12, atol=1e-12)
    half = copy.clone().bfloat16()
    step_(*signals, half, backend=backend)
    assert_close(half.double(), step(*signals, after)[1], rtol=1e-2, atol=2e-2)


def test_a_graph_that_needs_the_old_state_is_refused() -> None:
    _, _, ([u], weights, [state]) = CASES["diagonal"]
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    held = state.clone()
    loss = (weight * held).sum()
    flat.diagonal_ssm_stepper(*weights, backend="numba")(u, held)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
