from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.flat import mimo_ssm, mimo_ssm_chunk, mimo_ssm_step

BACKENDS = ["torch", "reference"]
FASTER = [backend for backend in BACKENDS if backend != "reference"]
LENGTHS = st.sampled_from([1, 2, 7, 15, 16, 17, 32, 37])
EXACT = {"rtol": 0, "atol": 1e-12}


def case(
    length: int,
    channels: int = 2,
    modes: int = 3,
    outputs: int = 4,
    batch: tuple[int, ...] = (2,),
) -> list[Tensor]:
    """Input, log_a (stable, any frequency), b, c, state; float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    log_a = torch.stack([-normal(modes).exp() / 5, 2 * normal(modes)], dim=-1)
    b, c = normal(modes, channels, 2), normal(outputs, modes, 2)
    return [normal(*batch, length, channels), log_a, b, c, normal(*batch, modes, 2)]


def run(backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: mimo_ssm(*inputs, backend=backend)


def run_chunk(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: mimo_ssm_chunk(*inputs, backend=backend)


def test_the_definition_is_the_sum_over_all_earlier_inputs() -> None:
    u, log_a, b, c, state = case(6, batch=())
    a, b_c, c_c, x = (np.asarray(t[..., 0] + 1j * t[..., 1]) for t in (log_a, b, c, state))
    y, _ = mimo_ssm_chunk(u, log_a, b, c, state, backend="reference")
    for t in range(6):
        x_t = np.exp(a * (t + 1)) * x
        for s in range(t + 1):
            x_t = x_t + np.exp(a * (t - s)) * (b_c @ u[s].numpy())
        np.testing.assert_allclose(y[t].numpy(), 2 * (c_c @ x_t).real, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=15, deadline=None)
@given(length=LENGTHS, modes=st.integers(1, 4), batch=st.sampled_from([(), (2,), (2, 3)]))
def test_equals_the_definition(
    agrees: Callable[..., None], backend: str, length: int, modes: int, batch: tuple[int, ...]
) -> None:
    inputs = case(length, modes=modes, batch=batch)
    agrees(run(backend), run("reference"), inputs[:4])
    agrees(run_chunk(backend), run_chunk("reference"), inputs)


@pytest.mark.parametrize("backend", FASTER)
def test_blocks_of_blocks_equal_the_definition(agrees: Callable[..., None], backend: str) -> None:
    agrees(run_chunk(backend), run_chunk("reference"), case(16 * 17 + 5, batch=()))


def test_a_step_is_a_chunk_of_one(agrees: Callable[..., None]) -> None:
    def step(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        y, state = mimo_ssm_step(u[:, 0], *others)
        return y[:, None], state

    agrees(step, run_chunk("reference"), case(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_that_die_at_once_are_harmless(backend: str) -> None:
    u, log_a, b, c, state = (t.requires_grad_() for t in case(40))
    dead = log_a - torch.tensor([500.0, 0.0])
    y, after = mimo_ssm_chunk(u, dead, b, c, state, backend=backend)
    gradients = torch.autograd.grad(y.sum() + after.sum(), [u, log_a, b, c, state])
    assert all(torch.isfinite(t).all() for t in (y, after, *gradients))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_state_stays_float32_below_half_precision(backend: str, half: torch.dtype) -> None:
    u, *others = (t.float() for t in case(5))
    y, after = mimo_ssm_chunk(u.to(half), *others, backend=backend)
    y_step, after_step = mimo_ssm_step(u[:, 0].to(half), *others)
    assert [t.dtype for t in (y, y_step)] == [half] * 2
    assert [t.dtype for t in (after, after_step)] == [torch.float32] * 2


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], backend: str
) -> None:
    rounds_well(run_chunk(backend), run_chunk("reference"), case(37))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_it_alone(backend: str) -> None:
    inputs = [t.float() for t in case(9)]
    wanted = run_chunk(backend)(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_chunk(backend)(*inputs)
    for one, other in zip(found, wanted, strict=True):
        assert one.equal(other)
