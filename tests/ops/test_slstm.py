from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stateline.errors import InputError
from stateline.ops import OPS, SLSTMCell, slstm
from stateline.ops.slstm import empty_cell

BACKENDS = [name for name in ("numba", "torch") if not OPS["slstm"].module(name)[1]]


def case(length: int, heads: int = 2, width: int = 3, batch: int = 2) -> list[Tensor]:
    """Gates, R and a state; float64."""
    draw = torch.Generator().manual_seed(0)
    gates = torch.randn(batch, length, 4, heads, width, dtype=torch.float64, generator=draw)
    weight = torch.randn(heads, width, 4, width, dtype=torch.float64, generator=draw)
    h, c, n, m = torch.randn(4, batch, heads, width, dtype=torch.float64, generator=draw).unbind()
    return [2 * gates, weight, h, c, 1 + n.abs(), m]


def run(backend: str) -> Callable[..., tuple[Tensor, ...]]:
    def call(gates: Tensor, weight: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        y, after = slstm(gates, weight, SLSTMCell(*state), backend=backend)
        return y, *after

    return call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("length", "heads", "width"), [(1, 1, 1), (2, 3, 4), (13, 2, 5)])
def test_equals_the_definition(
    agrees: Callable[..., None], backend: str, length: int, heads: int, width: int
) -> None:
    agrees(run(backend), run("reference"), case(length, heads, width))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_it_is_the_ratio_of_two_sums(backend: str) -> None:
    """Without a recurrent matrix, and from nothing, no scale is needed."""
    gates, weight, *_ = case(7)
    i, f, z, o = gates.unbind(dim=2)
    c = n = torch.zeros_like(i[:, 0])
    for t in range(7):
        c = f[:, t].sigmoid() * c + i[:, t].exp() * z[:, t].tanh()
        n = f[:, t].sigmoid() * n + i[:, t].exp()
    y, _ = slstm(gates, 0 * weight, empty_cell(weight, 2, 2, 3), backend=backend)
    torch.testing.assert_close(y[:, -1], o[:, -1].sigmoid() * c / n, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_the_first_token_is_written_however_small_its_gate_is(backend: str) -> None:
    gates, weight, *_ = case(9)
    moved = gates.clone()
    moved[:, :, 0] -= 1e6
    wanted, _ = slstm(gates, 0 * weight, empty_cell(weight, 2, 2, 3), backend=backend)
    found, _ = slstm(moved, 0 * weight, empty_cell(weight, 2, 2, 3), backend=backend)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)  # of rounding 1e6 + i


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_large_gates_neither_overflow_nor_vanish(backend: str) -> None:
    gates, weight, *_ = (x.float() for x in case(9))
    for size in (-900.0, 900.0):
        moved = gates.clone()
        moved[:, :, 0] += size
        wanted, _ = slstm(gates, 0 * weight, empty_cell(weight, 2, 2, 3), backend=backend)
        found, _ = slstm(moved, 0 * weight, empty_cell(weight, 2, 2, 3), backend=backend)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)  # of rounding 900 + i


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_chunks_are_the_whole_with_gradients(backend: str) -> None:
    gates, weight, *state = (x.requires_grad_() for x in case(9))
    whole = run(backend)(gates, weight, *state)
    head, *between = run(backend)(gates[:, :4], weight, *state)
    tail, *after = run(backend)(gates[:, 4:], weight, *between)
    chunked = (torch.cat([head, tail], dim=1), *after)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)
    leaves = gates, weight, *state
    for a, b in zip(*(torch.autograd.grad(y[0].sum(), leaves) for y in (chunked, whole))):  # noqa: B905
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], backend: str
) -> None:
    rounds_well(run(backend), run("reference"), case(13))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", ["slstm", "slstm_kernel"][: len(BACKENDS)])
def test_the_operators_keep_pytorchs_rules(name: str) -> None:
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = [t.float() for t in case(2)]
    grads = [torch.ones(2, 2, 2, 3), *(torch.ones_like(t) for t in inputs[2:])]
    backward = getattr(torch.ops.stateline, f"{name}_backward").default
    torch.library.opcheck(backward, (*grads, *inputs), test_utils=rules)
    leaves = [t.requires_grad_() for t in inputs]
    torch.library.opcheck(getattr(torch.ops.stateline, name).default, leaves, test_utils=rules)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("name", ["slstm", "slstm_kernel"][: len(BACKENDS)])
def test_outputs_lie_in_memory_as_compiled_code_expects(name: str) -> None:
    """The layer's gates are a permuted view, in which heads are the first axis."""
    gates, *others = (t.float() for t in case(2))
    gates = gates.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4)
    operator = getattr(torch.ops.stateline, name).default
    with FakeTensorMode() as mode:
        expected = operator(*map(mode.from_tensor, (gates, *others)))
    found = operator(gates, *others)
    assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_a_state_of_several_dtypes_is_refused() -> None:
    gates, weight, h, *sums = case(3)
    with pytest.raises(InputError, match="need one dtype, got bfloat16 and float64"):
        run("torch")(gates, weight, h.bfloat16(), *sums)


def test_a_number_of_gates_other_than_four_is_refused() -> None:
    gates, weight, *state = case(3)
    with pytest.raises(InputError, match="needs four gates, got 3"):
        run("reference")(gates[:, :, :3], weight[:, :, :3], *state)
