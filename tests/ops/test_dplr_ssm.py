from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.ops.discretization import bilinear
from stateline.ops.hippo import diagonal_plus_low_rank, hippo
from stateline.ops.planes import multiply
from tests.ops.flat import (
    diagonal_ssm_chunk,
    dplr_ssm,
    dplr_ssm_chunk,
    dplr_ssm_every,
    dplr_ssm_step,
)

BACKENDS = ["torch", "reference"]
FASTER = [backend for backend in BACKENDS if backend != "reference"]
LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 37])


def case(
    length: int, channels: int = 2, modes: int = 3, readouts: int = 1, batch: tuple[int, ...] = (2,)
) -> list[Tensor]:
    """Input, dt, a (stable, any frequency), p, b, c, state; float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    a = torch.stack([-normal(channels, modes).exp(), 3 * normal(channels, modes)], dim=-1)
    p, b, state = (normal(*rows, channels, modes, 2) for rows in ((), (), batch))
    c = normal(readouts * channels, modes, 2)
    return [normal(*batch, length, channels), normal(channels).exp() / 20, a, p, b, c, state]


def run(backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: dplr_ssm(*inputs, backend=backend)


def run_chunk(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: dplr_ssm_chunk(*inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_of_hippo_is_discretised_by_the_bilinear_rule(backend: str) -> None:
    """In the basis of HiPPO itself, where nothing is complex, diagonal or low rank."""
    size, dt = 8, 0.05
    values, low_rank, b = (t[None] for t in diagonal_plus_low_rank("legs", size))
    c = torch.randn(1, size // 2, 2, dtype=torch.float64)
    u = torch.randn(12, 1, dtype=torch.float64)
    y = dplr_ssm(
        u, torch.tensor([dt], dtype=torch.float64), values, low_rank[0], b, c, backend=backend
    )
    a, b_real, _ = (t.numpy() for t in hippo("legs", size))
    # C was given in the other basis: the outputs must be some readout of these states
    wanted = _recurrence(np.asarray(a), np.asarray(b_real), dt, u[:, 0].numpy())
    solution, *_ = np.linalg.lstsq(wanted, y[:, 0].numpy(), rcond=None)
    np.testing.assert_allclose(wanted @ solution, y[:, 0].numpy(), rtol=0, atol=1e-9)


def _recurrence(a: np.ndarray, b: np.ndarray, dt: float, u: np.ndarray) -> np.ndarray:
    """States of the bilinear rule."""
    one, x, states = np.eye(len(a)), np.zeros(len(a)), []
    for u_t in u:
        x = np.linalg.solve(one - dt / 2 * a, (one + dt / 2 * a) @ x + dt * b * u_t)
        states.append(x)
    return np.stack(states)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_low_rank_part_it_is_a_diagonal_ssm(backend: str) -> None:
    u, dt, a, p, b, c, state = case(13)
    log_a, gain = bilinear(dt[:, None, None] * a)
    b_bar = multiply(dt[:, None, None] * gain, b)
    wanted = diagonal_ssm_chunk(u, log_a, b_bar, c, state, backend="reference")
    found = run_chunk(backend)(u, dt, a, torch.zeros_like(p), b, c, state)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=12, deadline=None)
@given(
    length=LENGTHS,
    channels=st.integers(1, 3),
    modes=st.integers(1, 4),
    readouts=st.integers(1, 2),
    batch=st.sampled_from([(), (2,), (2, 3)]),
)
def test_equals_the_definition(
    agrees: Callable[..., None],
    backend: str,
    length: int,
    channels: int,
    modes: int,
    readouts: int,
    batch: tuple[int, ...],
) -> None:
    inputs = case(length, channels, modes, readouts, batch)
    agrees(run(backend), run("reference"), inputs[:6])
    agrees(run_chunk(backend), run_chunk("reference"), inputs)


@pytest.mark.parametrize("length", [5, 19, 43])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_some_outputs_are_those_of_all(
    agrees: Callable[..., None], length: int, batch: tuple[int, ...]
) -> None:
    def every(*inputs: Tensor) -> Tensor:
        return dplr_ssm_every(*inputs, 5)

    def all_of_them(*inputs: Tensor) -> Tensor:
        return dplr_ssm(*inputs, backend="reference")[..., 4::5, :]

    agrees(every, all_of_them, case(length, readouts=2, batch=batch)[:6])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [0, 4])
def test_too_few_inputs_give_no_output(backend: str, length: int) -> None:
    inputs = case(length, readouts=3)[:6]
    assert dplr_ssm_every(*inputs, 5, backend=backend).shape == (2, 0, 6)


def test_a_step_is_a_chunk_of_one(agrees: Callable[..., None]) -> None:
    def step(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        y, state = dplr_ssm_step(u[:, 0], *others)
        return y[:, None], state

    agrees(step, run_chunk("reference"), case(1, readouts=2))


@pytest.mark.parametrize("backend", FASTER)
def test_float32_is_as_good_after_a_thousand_steps(backend: str) -> None:
    """Powers of the transition do not lose the phase of HiPPO's fastest modes."""
    values, low_rank, b = diagonal_plus_low_rank("legs", 64)
    u, dt, _, _, _, c, state = (t.float() for t in case(1000, channels=1, modes=32, batch=()))
    system = [torch.full_like(dt, 0.01), values[None].float(), low_rank.float(), b[None].float()]
    found = run_chunk(backend)(u, *system, c, state)
    wanted = run_chunk("reference")(*(t.double() for t in (u, *system, c, state)))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 3e-6 * other.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_state_stays_float32_below_half_precision(backend: str, half: torch.dtype) -> None:
    u, *others = (t.float() for t in case(5))
    y, after = dplr_ssm_chunk(u.to(half), *others, backend=backend)
    y_step, after_step = dplr_ssm_step(u[:, 0].to(half), *others)
    whole = dplr_ssm(u.to(half), *others[:-1], backend=backend)
    assert [t.dtype for t in (y, y_step, whole)] == [half] * 3
    assert [t.dtype for t in (after, after_step)] == [torch.float32] * 2


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], backend: str
) -> None:
    inputs = case(37)
    rounds_well(run(backend), run("reference"), inputs[:6])
    rounds_well(run_chunk(backend), run_chunk("reference"), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_it_alone(backend: str) -> None:
    inputs = [t.float() for t in case(9)]
    wanted = run_chunk(backend)(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_chunk(backend)(*inputs)
    for one, other in zip(found, wanted, strict=True):
        assert one.equal(other)
