"""The delta rule with a decay for each entry of a key."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.flat import delta_rule, delta_rule_step, gated_delta_rule

FASTER = ["numba", "torch"]
LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 33, 70])


def case(length: int, strength: float = 0.1, keys: int = 3, values: int = 5) -> list[Tensor]:
    """Two rows of q, k, v, logarithmic decays, a, b and a state; float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k, a = (normal(2, length, 4, keys) for _ in range(3))
    a = F.normalize(a, dim=-1)
    b = -a * normal(2, length, 4, keys).sigmoid()
    log_decay = -strength * normal(2, length, 4, keys).exp()
    return [q, k, normal(2, length, 4, values), log_decay, a, b, normal(2, 4, keys, values)]


def run(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: delta_rule(*inputs, backend=backend)


def test_the_definition_multiplies_the_state_by_a_matrix() -> None:
    q, k, v, log_decay, a, b, state = case(1)
    y, after = delta_rule(q, k, v, log_decay, a, b, state, backend="reference")
    kept = torch.diag(log_decay[1, 0, 2].exp()) + torch.outer(b[1, 0, 2], a[1, 0, 2])
    wanted = kept @ state[1, 2] + torch.outer(k[1, 0, 2], v[1, 0, 2])
    torch.testing.assert_close(after[1, 2], wanted)
    torch.testing.assert_close(y[1, 0, 2], q[1, 0, 2] @ wanted)


def test_with_one_decay_per_head_it_can_be_the_gated_delta_rule() -> None:
    q, k, v, log_decay, a, _, state = case(20)
    decay, beta = log_decay[..., 0], k[..., 0].sigmoid()
    each, written = decay[..., None].expand_as(q), beta[..., None] * a
    wanted = gated_delta_rule(q, a, v, decay, beta, state, backend="reference")
    found = delta_rule(q, written, v, each, each.exp() * a, -written, state, backend="reference")
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=6)
@given(length=LENGTHS)
def test_it_equals_its_definition(agrees: Callable[..., None], backend: str, length: int) -> None:
    agrees(run(backend), run("reference"), case(length))


@pytest.mark.parametrize("sizes", [(1, 1), (20, 33)])
def test_any_size_is_the_definition(agrees: Callable[..., None], sizes: tuple[int, int]) -> None:
    for backend in FASTER:
        agrees(run(backend), run("reference"), case(35, 0.1, *sizes))


@pytest.mark.parametrize("strength", [1.0, 100.0, 1e4])
def test_strong_decays_lose_nothing(agrees: Callable[..., None], strength: float) -> None:
    for backend in FASTER:
        agrees(run(backend), run("reference"), case(40, strength))


def test_half_precision_costs_no_more_than_it_must(rounds_well: Callable[..., None]) -> None:
    q, k, v, *rest = case(40)
    v_first = lambda op: lambda v, q, k, *rest: op(q, k, v, *rest)  # noqa: E731
    for backend in FASTER:
        rounds_well(v_first(run(backend)), v_first(run("reference")), [v, q, k, *rest])


@pytest.mark.parametrize("backend", FASTER)
def test_a_step_is_a_piece_of_length_one(backend: str) -> None:
    *inputs, state = case(1)
    y, after = delta_rule(*inputs, state)
    found = delta_rule_step(*(x[:, 0] for x in inputs), state, backend=backend)
    torch.testing.assert_close(found, (y[:, 0], after))


@pytest.mark.parametrize("backend", [*FASTER, "reference"])
def test_no_state_is_the_zero_state(backend: str) -> None:
    *signals, state = case(9)
    wanted = delta_rule(*signals, torch.zeros_like(state), backend=backend)
    torch.testing.assert_close(delta_rule(*signals, backend=backend), wanted, rtol=0, atol=0)
