from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.flat import diagonal_ssm, diagonal_ssm_chunk, diagonal_ssm_every, diagonal_ssm_step

BACKENDS = ["numba", "torch", "reference"]
WITH_EVERY = ["torch", "reference"]
FASTER = [backend for backend in BACKENDS if backend != "reference"]
LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 37])
EXACT = {"rtol": 0, "atol": 1e-12}


def case(
    length: int, channels: int = 2, modes: int = 3, batch: tuple[int, ...] = (2,), seed: int = 0
) -> list[Tensor]:
    """Input, log_a (stable, any frequency), b, c, state; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    log_a = torch.stack([-normal(channels, modes).exp() / 5, 2 * normal(channels, modes)], dim=-1)
    b, c = normal(channels, modes, 2), normal(channels, modes, 2)
    return [normal(*batch, length, channels), log_a, b, c, normal(*batch, channels, modes, 2)]


def run(backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: diagonal_ssm(*inputs, backend=backend)


def run_chunk(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: diagonal_ssm_chunk(*inputs, backend=backend)


def test_the_definition_is_a_convolution_with_the_kernel_of_the_paper() -> None:
    u, log_a, b, c, _ = case(9, batch=())
    a, b_c, c_c = (np.asarray(t[..., 0] + 1j * t[..., 1]) for t in (log_a, b, c))
    kernel = 2 * np.einsum("hn,hn,hnl->hl", c_c, b_c, np.exp(a)[..., None] ** np.arange(9)).real
    y = diagonal_ssm(u, log_a, b, c, backend="reference")
    for channel in range(2):
        wanted = np.convolve(u[:, channel].numpy(), kernel[channel])[:9]
        np.testing.assert_allclose(y[:, channel].numpy(), wanted, rtol=0, atol=1e-12)


def test_a_state_decays_as_in_the_paper() -> None:
    u, log_a, b, c, state = case(5, batch=())
    a, c_c, x = (np.asarray(t[..., 0] + 1j * t[..., 1]) for t in (log_a, c, state))
    powers = np.exp(a)[..., None] ** np.arange(1, 6)
    y, after = diagonal_ssm_chunk(torch.zeros_like(u), log_a, b, c, state, backend="reference")
    wanted = 2 * np.einsum("hn,hn,hnl->lh", c_c, x, powers).real
    np.testing.assert_allclose(y.numpy(), wanted, rtol=0, atol=1e-12)
    found = (after[..., 0] + 1j * after[..., 1]).numpy()
    np.testing.assert_allclose(found, x * powers[..., -1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=15)
@given(
    length=LENGTHS,
    channels=st.integers(1, 3),
    modes=st.integers(1, 4),
    batch=st.sampled_from([(), (2,), (2, 3)]),
)
def test_equals_the_definition(
    agrees: Callable[..., None],
    backend: str,
    length: int,
    channels: int,
    modes: int,
    batch: tuple[int, ...],
) -> None:
    inputs = case(length, channels, modes, batch)
    agrees(run(backend), run("reference"), inputs[:4])
    agrees(run_chunk(backend), run_chunk("reference"), inputs)


@pytest.mark.parametrize("backend", WITH_EVERY)
@pytest.mark.parametrize("length", [5, 19, 170])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_some_outputs_are_those_of_all(
    agrees: Callable[..., None], backend: str, length: int, batch: tuple[int, ...]
) -> None:
    u, log_a, b, c, _ = case(length, batch=batch)
    several = torch.cat([c, case(1, seed=1)[3]])

    def every(*inputs: Tensor) -> Tensor:
        return diagonal_ssm_every(*inputs, 5, backend=backend)

    def all_of_them(*inputs: Tensor) -> Tensor:
        return diagonal_ssm(*inputs, backend="reference")[..., 4::5, :]

    agrees(every, all_of_them, [u, log_a, b, several])
    torch.testing.assert_close(
        every(u, log_a[:1], b, c), all_of_them(u, log_a[:1].expand_as(log_a), b, c), **EXACT
    )


@pytest.mark.parametrize("backend", WITH_EVERY)
@pytest.mark.parametrize("length", [0, 4])
def test_too_few_inputs_give_no_output(backend: str, length: int) -> None:
    inputs = case(length)[:4]
    assert diagonal_ssm_every(*inputs, 5, backend=backend).shape == (2, 0, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_transition_serves_all_channels(backend: str) -> None:
    u, log_a, *others = case(13, channels=3)
    wanted = run_chunk("reference")(u, log_a[:1].expand_as(log_a), *others)
    for a, b in zip(run_chunk(backend)(u, log_a[:1], *others), wanted, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 13])
def test_every_readout_reads_the_same_states(backend: str, length: int) -> None:
    u, log_a, b, c, state = case(length, channels=2)
    other = case(1, channels=2, seed=1)[3]
    found, after = run_chunk(backend)(u, log_a, b, torch.cat([c, other]), state)
    one, wanted = run_chunk("reference")(u, log_a, b, c, state)
    two, _ = run_chunk("reference")(u, log_a, b, other, state)
    torch.testing.assert_close(found, torch.cat([one, two], dim=-1), **EXACT)
    torch.testing.assert_close(after, wanted, **EXACT)
    y, _ = diagonal_ssm_step(u[:, 0], log_a, b, torch.cat([c, other]), state)
    torch.testing.assert_close(y, found[:, 0], **EXACT)


def test_a_step_is_a_chunk_of_one(agrees: Callable[..., None]) -> None:
    u, *others = case(1)

    def step(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        y, state = diagonal_ssm_step(u[:, 0], *others)
        return y[:, None], state

    agrees(step, run_chunk("reference"), [u, *others])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15)
@given(cut=st.integers(1, 16))
def test_two_chunks_are_the_whole(backend: str, cut: int) -> None:
    u, *others, state = (t.requires_grad_() for t in case(17))
    head, middle = run_chunk(backend)(u[:, :cut], *others, state)
    tail, after = run_chunk(backend)(u[:, cut:], *others, middle)
    chunked = torch.cat([head, tail], dim=1), after
    whole = run_chunk("reference")(u, *others, state)
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    found, wanted = (
        torch.autograd.grad(sum(t.square().sum() for t in results), [u, *others, state])
        for results in (chunked, whole)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_from_the_zero_state_is_the_whole_sequence(backend: str) -> None:
    *inputs, state = case(13)
    y, _ = diagonal_ssm_chunk(*inputs, torch.zeros_like(state), backend=backend)
    torch.testing.assert_close(y, run("reference")(*inputs), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_does_not_wrap_around_to_the_start(backend: str) -> None:
    u, log_a, b, c, _ = case(13)
    u[:, :-1] = 0
    slow = log_a * torch.tensor([1e-3, 1.0])  # still loud after a full turn
    assert diagonal_ssm(u, slow, b, c, backend=backend)[:, :-1].abs().max() < 1e-13


@pytest.mark.parametrize("backend", FASTER)
def test_all_leading_axes_are_batch_axes(backend: str) -> None:
    u, *others, state = case(7, batch=(2, 3))
    y, after = run_chunk(backend)(u, *others, state)
    for row in [(0, 0), (1, 2)]:
        y_row, after_row = run_chunk("reference")(u[row], *others, state[row])
        torch.testing.assert_close(y[row], y_row, **EXACT)
        torch.testing.assert_close(after[row], after_row, **EXACT)


@pytest.mark.parametrize("backend", FASTER)
def test_float32_is_as_good_after_a_thousand_steps(backend: str) -> None:
    """Powers of the transition do not lose the phase."""
    u, log_a, b, c, state = (t.float() for t in case(1000, batch=()))
    inputs = [u, log_a * torch.tensor([1e-3, 1.0]), b, c, state]
    found = run_chunk(backend)(*inputs)
    wanted = run_chunk("reference")(*(t.double() for t in inputs))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_that_die_at_once_are_harmless(backend: str) -> None:
    u, log_a, b, c, state = (t.requires_grad_() for t in case(13))
    dead = log_a - torch.tensor([500.0, 0.0])
    y, after = diagonal_ssm_chunk(u, dead, b, c, state, backend=backend)
    gradients = torch.autograd.grad(y.sum() + after.sum(), [u, log_a, b, c, state])
    assert all(torch.isfinite(t).all() for t in (y, after, *gradients))


@pytest.mark.parametrize("backend", FASTER)
def test_modes_that_all_but_die_at_once_leave_the_state_of_the_last_input(
    agrees: Callable[..., None], backend: str
) -> None:
    """Transitions near the least float32, which have hardly any digits."""
    u, log_a, *others = case(37)
    near = log_a - torch.tensor([102.0, 0.0])
    agrees(run_chunk(backend), run_chunk("reference"), [u, near, *others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_state_stays_float32_below_half_precision(backend: str, half: torch.dtype) -> None:
    u, *others = (t.float() for t in case(5))
    y, after = diagonal_ssm_chunk(u.to(half), *others, backend=backend)
    y_step, after_step = diagonal_ssm_step(u[:, 0].to(half), *others)
    whole = diagonal_ssm(u.to(half), *others[:3], backend=backend)
    assert [t.dtype for t in (y, y_step, whole)] == [half] * 3
    assert [t.dtype for t in (after, after_step)] == [torch.float32] * 2


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], backend: str
) -> None:
    inputs = case(37)
    rounds_well(run(backend), run("reference"), inputs[:4])
    rounds_well(run_chunk(backend), run_chunk("reference"), inputs)
