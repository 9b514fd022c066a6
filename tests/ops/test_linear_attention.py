"""Linear attention, and the delta rule that improves on it."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from tests.ops.flat import (
    gated_delta_rule,
    gated_delta_rule_step,
    linear_attention,
    linear_attention_step,
)

FASTER = ["numba", "torch"]
LENGTHS = st.sampled_from([1, 2, 5, 31, 32, 33, 64, 65, 130])


@pytest.fixture(scope="module", params=[0, math.inf], ids=["chunks", "recurrence"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with both kernels for one decay per head, whatever the size of the state.

    Where numba is missing there is nothing to choose: the test itself is skipped, or needs none.
    """
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            name = "stateline.ops.linear_attention.numba_backend"
            patch.setattr(importlib.import_module(name), "LEAST", request.param)
        yield


def case(
    length: int,
    groups: int = 2,
    heads: int = 4,
    strength: float = 0.1,
    keys: int = 3,
    values: int = 5,
) -> list[Tensor]:
    """Two rows of q, k, v, logarithmic decays and a state; float64."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k = normal(2, length, groups, keys), normal(2, length, groups, keys)
    v, state = normal(2, length, heads, values), normal(2, heads, keys, values)
    return [q, k, v, -strength * normal(2, length, heads).exp(), state]


def by_entry(length: int, groups: int = 2, strength: float = 0.1) -> list[Tensor]:
    """The same where each entry of a key decays by itself."""
    q, k, v, _, state = case(length, groups)
    generator = torch.Generator().manual_seed(length + 1)
    noise = torch.randn(2, length, 4, 3, dtype=torch.float64, generator=generator)
    return [q, k, v, -strength * noise.exp(), state]


def delta_case(length: int, strength: float = 0.1) -> list[Tensor]:
    """Two rows of q, k, v, logarithmic decays, beta and a state; float64."""
    q, k, v, log_decay, state = case(length, groups=4, strength=strength)
    beta = v[..., 0].sigmoid()
    return [q, F.normalize(k, dim=-1), v, log_decay, beta, state]


def run(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: linear_attention(*inputs, backend=backend)


def without_decay(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v, state: linear_attention(q, k, v, None, state, backend=backend)


def run_delta(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *inputs: gated_delta_rule(*inputs, backend=backend)


def test_the_definition_is_attention_with_decayed_scores() -> None:
    q, k, v, log_decay, _ = case(9, groups=4)
    y, _ = linear_attention(q, k, v, log_decay, backend="reference")
    total = log_decay.cumsum(dim=1)
    decay = (total[:, :, None] - total[:, None]).exp().movedim(-1, 1).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * decay
    torch.testing.assert_close(y, torch.einsum("bhij,bjhd->bihd", scores, v))


def test_entries_of_keys_that_decay_together_decay_as_heads_do() -> None:
    q, k, v, log_decay, state = case(9)
    wanted = linear_attention(q, k, v, log_decay, state, backend="reference")
    each = log_decay[..., None].expand(-1, -1, -1, 3)
    torch.testing.assert_close(linear_attention(q, k, v, each, state, backend="reference"), wanted)


def test_the_definition_with_a_decay_per_entry_is_diagonal() -> None:
    q, k, v, log_decay, state = by_entry(1, groups=4)
    _, after = linear_attention(q, k, v, log_decay, state, backend="reference")
    kept = torch.diag(log_decay[1, 0, 2].exp()) @ state[1, 2]
    torch.testing.assert_close(after[1, 2], kept + torch.outer(k[1, 0, 2], v[1, 0, 2]))


def test_without_replacing_and_forgetting_the_delta_rule_only_reads() -> None:
    q, k, v, log_decay, beta, state = delta_case(6)
    y, after = gated_delta_rule(q, k, v, 0 * log_decay, 0 * beta, state)
    torch.testing.assert_close(after, state)
    torch.testing.assert_close(y, torch.einsum("bthk,bhkv->bthv", q, state))


@pytest.mark.parametrize("backend", [*FASTER, "reference"])
def test_what_is_written_last_is_found_at_its_key(backend: str) -> None:
    _, k, v, log_decay, beta, state = delta_case(7)
    y, _ = gated_delta_rule(k, k, v, log_decay, torch.ones_like(beta), state, backend=backend)
    torch.testing.assert_close(y, v)


def test_the_delta_rule_multiplies_the_state_as_in_the_paper() -> None:
    q, k, v, log_decay, beta, state = delta_case(1)
    _, after = gated_delta_rule(q, k, v, log_decay, beta, state, backend="reference")
    key, alpha, b = k[0, 0, 0], log_decay[0, 0, 0].exp(), beta[0, 0, 0]
    s = state[0, 0].T  # the paper's is (value, key)
    kept = s @ (alpha * (torch.eye(3) - b * torch.outer(key, key)))
    wanted = kept + b * torch.outer(v[0, 0, 0], key)
    torch.testing.assert_close(after[0, 0].T, wanted)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=8)
@given(length=LENGTHS, groups=st.sampled_from([1, 2, 4]))
def test_linear_attention_equals_its_definition(
    agrees: Callable[..., None], backend: str, length: int, groups: int
) -> None:
    q, k, v, log_decay, state = case(length, groups)
    agrees(run(backend), run("reference"), [q, k, v, log_decay, state])
    agrees(without_decay(backend), without_decay("reference"), [q, k, v, state])
    agrees(run(backend), run("reference"), by_entry(length, groups))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("keys", "values"), [(19, 5), (8, 37), (24, 150)])
def test_blocks_of_keys_and_values_equal_the_definition(
    agrees: Callable[..., None], keys: int, values: int
) -> None:
    inputs = case(45, groups=1, heads=2, keys=keys, values=values)
    agrees(run("numba"), run("reference"), [keys**-0.5 * inputs[0], *inputs[1:]])


@pytest.mark.usefixtures("both_ways")
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module("stateline.ops.numba_common.launch")
    monkeypatch.setattr(launch, "LEAST_WORK", 0.0)
    inputs = [t.float().requires_grad_() for t in case(45, keys=24, values=150)]

    def found(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        y, after = run("numba")(*inputs)
        gradients = torch.autograd.grad(y.sum() + after.sum(), inputs)
        torch.set_num_threads(before)
        return [y, after, *gradients]

    assert all(a.equal(b) for a, b in zip(found(1), found(3), strict=True))


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=8)
@given(length=LENGTHS)
def test_the_delta_rule_equals_its_definition(
    agrees: Callable[..., None], backend: str, length: int
) -> None:
    agrees(run_delta(backend), run_delta("reference"), delta_case(length))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("strength", [1.0, 100.0, 1e4])
def test_strong_decays_lose_nothing(agrees: Callable[..., None], strength: float) -> None:
    for backend in FASTER:
        agrees(run(backend), run("reference"), case(70, strength=strength))
        agrees(run(backend), run("reference"), by_entry(70, strength=strength))
        agrees(run_delta(backend), run_delta("reference"), delta_case(70, strength=strength))


@pytest.mark.usefixtures("both_ways")
def test_what_follows_a_strong_decay_is_as_exact_as_anything(agrees: Callable[..., None]) -> None:
    q, k, v, log_decay, state = case(40, strength=0.01)
    log_decay[:, 3] = -1e5
    for backend in FASTER:
        agrees(run(backend), run("reference"), [q, k, v, log_decay, state])
    q, k, v, log_decay, state = by_entry(40, strength=0.01)
    log_decay[:, 3, :, 1] = -1e5
    for backend in FASTER:
        agrees(run(backend), run("reference"), [q, k, v, log_decay, state])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("backend", FASTER)
@pytest.mark.parametrize("strength", [0.1, 5.0, 20.0])
def test_small_gradients_of_strong_decays_keep_their_digits(backend: str, strength: float) -> None:
    q, k, v, log_decay, state = (t.float() for t in case(70))
    log_decay = (-strength * (1 + log_decay.sigmoid())).requires_grad_()

    def gradient(backend: str, *given: Tensor) -> Tensor:
        y, after = linear_attention(*given, backend=backend)
        return torch.autograd.grad(y.double().sum() + after.double().sum(), given[3])[0].double()

    wanted = gradient("reference", *(t.double() for t in (q, k, v, log_decay, state)))
    error = gradient(backend, q, k, v, log_decay, state) - wanted
    assert error.abs().max() <= 5e-6 * wanted.abs().max()


def test_half_precision_costs_no_more_than_it_must(rounds_well: Callable[..., None]) -> None:
    q, k, v, log_decay, state = case(70)
    v_first = lambda op: lambda v, q, k, *rest: op(q, k, v, *rest)  # noqa: E731
    for backend in FASTER:
        rounds_well(v_first(run(backend)), v_first(run("reference")), [v, q, k, log_decay, state])
    q, k, v, *rest = delta_case(70)
    for backend in FASTER:
        exact = v_first(run_delta("reference"))
        rounds_well(v_first(run_delta(backend)), exact, [v, q, k, *rest])


def test_a_step_is_a_piece_of_length_one() -> None:
    q, k, v, log_decay, state = case(1)
    y, after = linear_attention(q, k, v, log_decay, state)
    found = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], state)
    torch.testing.assert_close(found, (y[:, 0], after))
    *inputs, state = by_entry(1)
    y, after = linear_attention(*inputs, state)
    found = linear_attention_step(*(t[:, 0] for t in inputs), state)
    torch.testing.assert_close(found, (y[:, 0], after))
    *inputs, state = delta_case(1)
    y, after = gated_delta_rule(*inputs, state)
    found = gated_delta_rule_step(*(t[:, 0] for t in inputs), state)
    torch.testing.assert_close(found, (y[:, 0], after))


def test_groups_that_do_not_fit_are_refused() -> None:
    q, k, v, _, state = case(2, groups=3)
    with pytest.raises(InputError, match="must divide the heads, got 3 and 4"):
        linear_attention(q, k, v, None, state)
    q, k, v, log_decay, state = by_entry(2)
    with pytest.raises(InputError, match=r"each of the 3 entries of a key, got .* \(2,\)"):
        linear_attention(q, k, v, log_decay[..., :2], state)


@pytest.mark.parametrize("backend", [*FASTER, "reference"])
def test_no_state_is_the_zero_state(backend: str) -> None:
    *signals, state = case(9)
    wanted = linear_attention(*signals, torch.zeros_like(state), backend=backend)
    found = linear_attention(*signals, backend=backend)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    *others, state = delta_case(9)
    wanted = gated_delta_rule(*others, torch.zeros_like(state), backend=backend)
    found = gated_delta_rule(*others, backend=backend)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
