from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.selective_scan import pytorch
from tests.ops.flat import selective_scan, selective_scan_step

BACKENDS = ["numba", "torch", "reference"]
FASTER = ["numba", "torch"]


def case(length: int, channels: int = 4, d_state: int = 3, groups: int = 2) -> list[Tensor]:
    """Two rows of u, dt, A, B, C and a state; float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    dt = F.softplus(normal(2, length, channels))
    b, c = normal(2, length, groups, d_state), normal(2, length, groups, d_state)
    a = -normal(channels, d_state).exp()
    return [normal(2, length, channels), dt, a, b, c, normal(2, channels, d_state)]


def run(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: selective_scan(*inputs, backend=backend)


def test_with_constant_steps_it_is_the_convolution_of_a_diagonal_ssm() -> None:
    u, _, a, *_ = case(9)
    b, c = torch.randn(2, *a.shape, dtype=torch.float64).unbind()
    dt, (enter, leave) = torch.full_like(u, 0.3), (x.expand(2, 9, -1, -1) for x in (b, c))
    y, _ = selective_scan(u, dt, a, enter, leave, backend="reference")
    powers = (0.3 * a[..., None] * torch.arange(9)).exp()  # (channel, d_state, length)
    kernel = 0.3 * torch.einsum("dn,dn,dnl->dl", c, b, powers)
    for t in range(9):
        wanted = sum(kernel[:, s] * u[:, t - s] for s in range(t + 1))
        torch.testing.assert_close(y[:, t], wanted)


def test_a_large_step_writes_the_input_and_forgets_the_past() -> None:
    u, dt, a, b, c, state = case(1)
    _, after = selective_scan(u, dt + 1e4, a, b, c, state)
    written = ((dt + 1e4) * u)[:, 0, :, None] * b[:, 0].repeat_interleave(2, dim=1)
    torch.testing.assert_close(after, written)


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=10)
@given(
    length=st.sampled_from([1, 2, 5, 16, 17, 33]),
    groups=st.sampled_from([1, 2, 4]),
    d_state=st.integers(1, 4),
)
def test_equals_the_definition(
    agrees: Callable[..., None], backend: str, length: int, groups: int, d_state: int
) -> None:
    agrees(run(backend), run("reference"), case(length, groups=groups, d_state=d_state))


@pytest.mark.parametrize("block", [1, 24, 72, 100])
def test_how_time_is_cut_into_blocks_changes_nothing(
    agrees: Callable[..., None], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(pytorch, "BLOCK", block)
    agrees(run("torch"), run("reference"), case(11))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_state_is_the_zero_state(backend: str) -> None:
    *signals, state = case(7)
    wanted = selective_scan(*signals, torch.zeros_like(state), backend=backend)
    torch.testing.assert_close(selective_scan(*signals, backend=backend), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_costs_no_more_than_it_must(
    rounds_well: Callable[..., None], backend: str
) -> None:
    u, dt, a, b, c, state = case(37)
    rounds_well(run(backend), run("reference"), [u, dt, a, b, c, state])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strong_decays_neither_overflow_nor_become_nan(backend: str) -> None:
    u, dt, a, b, c, state = (t.float().requires_grad_() for t in case(20))
    y, after = selective_scan(u, dt * 1e4, a * 1e4, b, c, state, backend=backend)
    gradients = torch.autograd.grad((y.square().sum() + after.square().sum()).log(), [u, dt, a])
    assert all(t.isfinite().all() for t in (y, after, *gradients))


def test_a_step_is_a_piece_of_length_one() -> None:
    u, dt, a, b, c, state = case(1)
    y, after = selective_scan(u, dt, a, b, c, state)
    found = selective_scan_step(u[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], state)
    torch.testing.assert_close(found, (y[:, 0], after))


@pytest.mark.parametrize("backend", FASTER)
def test_nothing_but_inputs_is_kept_for_the_backward_pass(backend: str) -> None:
    inputs = [t.requires_grad_() for t in case(64)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        selective_scan(*inputs, backend=backend)
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    assert {t.untyped_storage().data_ptr() for t in kept} <= storages


def test_groups_that_do_not_fit_are_refused() -> None:
    u, dt, a, b, c, state = case(2, groups=3)
    with pytest.raises(InputError, match="must divide the channels, got 3 and 4"):
        selective_scan(u, dt, a, b, c, state)
