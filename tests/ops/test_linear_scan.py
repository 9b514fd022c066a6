from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.ops import linear_scan, linear_scan_step, linear_scan_step_

FASTER = ["numba", "torch"]


def case(length: int, channels: int = 5) -> list[Tensor]:
    """Two rows of factors from -1 to 1, inputs and a state; float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return [normal(2, length, channels).tanh(), normal(2, length, channels), normal(2, channels)]


def run(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs, **named: linear_scan(*inputs, backend=backend, **named)


def test_with_factors_of_one_it_is_the_cumulative_sum() -> None:
    _, b, state = case(9)
    h, after = linear_scan(torch.ones_like(b), b, state, backend="reference")
    torch.testing.assert_close(h, state[:, None] + b.cumsum(dim=1))
    torch.testing.assert_close(after, h[:, -1])


def test_with_a_constant_factor_the_past_fades_exponentially() -> None:
    _, b, state = case(7)
    h, _ = linear_scan(torch.full_like(b, 0.5), torch.zeros_like(b), state)
    torch.testing.assert_close(h, state[:, None] * 0.5 ** torch.arange(1.0, 8.0)[:, None])


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=10)
@given(length=st.sampled_from([1, 2, 3, 16, 17, 33]), channels=st.sampled_from([1, 5, 16, 67, 130]))
def test_equals_the_definition(
    agrees: Callable[..., None], backend: str, length: int, channels: int
) -> None:
    agrees(run(backend), run("reference"), case(length, channels))


@pytest.mark.parametrize("backend", FASTER)
def test_factors_above_one_and_of_zero_are_the_definition(
    agrees: Callable[..., None], backend: str
) -> None:
    f, b, state = case(20)
    f[:, ::3], f[:, 1::3] = 0.0, 2.0
    agrees(run(backend), run("reference"), [f, b, state])


@pytest.mark.parametrize("backend", [*FASTER, "reference"])
def test_documents_begin_from_the_zero_state(backend: str) -> None:
    f, b, state = case(10)
    starts = torch.zeros(2, 10, dtype=torch.bool)
    starts[0, 4] = starts[1, 0] = True
    h, after = linear_scan(f, b, state, starts=starts, backend=backend)
    head, _ = linear_scan(f[:1, :4], b[:1, :4], state[:1])
    tail, last = linear_scan(f[:1, 4:], b[:1, 4:])
    other, end = linear_scan(f[1:], b[1:])
    wanted = torch.cat([torch.cat([head, tail], dim=1), other])
    torch.testing.assert_close((h, after), (wanted, torch.cat([last, end])))


@pytest.mark.parametrize("backend", [*FASTER, "reference"])
def test_no_tokens_leave_the_state(backend: str) -> None:
    f, b, state = case(0)
    h, after = linear_scan(f, b, state, backend=backend)
    assert h.shape == b.shape
    assert after.equal(state)
    assert after.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_costs_no_more_than_it_must(
    rounds_well: Callable[..., None], backend: str
) -> None:
    rounds_well(run(backend), run("reference"), case(37))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_step_is_a_piece_of_length_one(backend: str) -> None:
    f, b, state = case(1)
    h, after = linear_scan(f, b, state)
    found = linear_scan_step(f[:, 0], b[:, 0], state, backend=backend)
    torch.testing.assert_close(found, (h[:, 0], after))
    held = torch.stack([state, state], dim=-1)[..., 0]  # a view with gaps
    torch.testing.assert_close(linear_scan_step_(f[:, 0], b[:, 0], held), h[:, 0])
    torch.testing.assert_close(held, after)


@pytest.mark.parametrize("backend", FASTER)
def test_nothing_but_inputs_is_kept_for_the_backward_pass(backend: str) -> None:
    inputs = [t.requires_grad_() for t in case(64)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear_scan(*inputs, backend=backend)
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    assert {t.untyped_storage().data_ptr() for t in kept} <= storages
