"""Pointwise ops, and attention to parts of a joint projection."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from stateline.errors import InputError
from stateline.ops import (
    OPS,
    FeedForwardWeights,
    attention,
    feed_forward,
    linear_stepper,
    rms_norm,
    rotary,
    swiglu,
)

BACKENDS = ["numba", "torch"]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def maps(width: int = 6, hidden: int = 37) -> list[Tensor]:
    return [normal(hidden, width), normal(hidden), normal(4, hidden), normal(4)]


def reason(name: str, *inputs: Any) -> str:
    return OPS["pointwise"].reasons(name, *inputs)["numba"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 5, 6)])
def test_the_feed_forward_is_its_definition(
    agrees: Callable[..., None], backend: str, shape: tuple[int, ...]
) -> None:
    inputs = [normal(*shape), *maps()]
    agrees(
        lambda x, *w: feed_forward(x, FeedForwardWeights(*w), backend=backend),
        lambda x, *w: feed_forward(x, FeedForwardWeights(*w), backend="reference"),
        [t.detach() for t in inputs],
    )


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)])
def test_a_feed_forward_of_no_positions_has_gradients(backend: str, shape: tuple[int, ...]) -> None:
    x, weights = normal(*shape), maps()
    y = feed_forward(x, FeedForwardWeights(*weights), backend=backend)
    assert y.shape == (*shape[:-1], 4)
    of_x, *of_weights = torch.autograd.grad(y.sum(), [x, *weights])
    assert of_x.shape == x.shape
    assert not any(gradient.any() for gradient in of_weights)


def test_frozen_weights_of_a_feed_forward_cost_no_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = pytest.importorskip("stateline.ops.pointwise.numba_backend")
    monkeypatch.delattr(backend, "weight_gradient")
    x, weights = normal(5, 6), maps()
    frozen = [weight.detach() for weight in weights]
    y, wanted = (
        feed_forward(x, FeedForwardWeights(*given), backend=name)
        for given, name in ((frozen, "numba"), (weights, "reference"))
    )
    assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, wanted)))


@pytest.mark.parametrize("shape", [(14,), (3, 5, 14), (150, 66)])
def test_gates_and_norms_are_their_definitions(
    agrees: Callable[..., None], backend: str, shape: tuple[int, ...]
) -> None:
    """Also where the rows are more than a block whose gradients are summed together."""
    x, weight = normal(*shape).detach(), normal(shape[-1]).detach()
    agrees(lambda h: swiglu(h, backend=backend), lambda h: swiglu(h, backend="reference"), [4 * x])
    agrees(
        lambda x, w: rms_norm(x, w, 1e-5, backend=backend),
        lambda x, w: rms_norm(x, w, 1e-5, backend="reference"),
        [x, weight],
    )


def test_no_positions_have_gradients(backend: str) -> None:
    x, weight = normal(0, 6), normal(6)
    for y in (swiglu(x, backend=backend), rms_norm(x, weight, 1e-5, backend=backend)):
        of_x, of_weight = torch.autograd.grad(y.sum(), [x, weight], allow_unused=True)
        assert of_x.shape == x.shape
        assert of_weight is None or not of_weight.any()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_rounded_once(backend: str, autocast: bool) -> None:
    """Results and gradients of the feed-forward, whose products are rounded, are near."""
    dtype = torch.float32 if autocast else torch.bfloat16
    x, weights = normal(3, 40, 6), maps()
    halves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights)]
    same = [t.detach().bfloat16().double().requires_grad_() for t in (x, *weights)]
    wanted = feed_forward(same[0], FeedForwardWeights(*same[1:]), backend="reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = feed_forward(halves[0], FeedForwardWeights(*halves[1:]), backend=backend)
    assert y.dtype == torch.bfloat16
    found = y, *torch.autograd.grad(y.sum(), halves)
    for a, b in zip(found, (wanted, *torch.autograd.grad(wanted.sum(), same)), strict=True):
        assert (a - b).norm() <= 2**-6 * b.norm()


def test_gates_norms_and_rotations_of_bfloat16_are_rounded_once() -> None:
    pytest.importorskip("numba")
    x, w, heads = normal(150, 66), normal(66), normal(2, 5, 3, 22)
    angles = normal(1, 5, 9).detach().float()
    calls: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (swiglu, [x]),
        (lambda x, w, **b: rms_norm(x, w, 1e-5, **b), [x, w]),
        (lambda x, **b: rotary(x, angles.cos(), angles.sin(), **b), [heads]),
    ]
    for call, inputs in calls:
        halves = [t.detach().bfloat16().requires_grad_() for t in inputs]
        same = [t.detach().float().requires_grad_() for t in halves]
        y, wanted = call(*halves, backend="numba"), call(*same, backend="reference")
        assert y.dtype == torch.bfloat16
        found = y, *torch.autograd.grad(y.float().sum(), halves)
        exact = wanted, *torch.autograd.grad(wanted.sum(), same)
        for a, b in zip(found, exact, strict=True):
            assert_close(a.float(), b, rtol=2**-8, atol=1e-5)


def test_a_gate_needs_two_halves() -> None:
    with pytest.raises(InputError, match="two halves, got 5 entries"):
        swiglu(normal(3, 5))


def test_calls_that_the_kernels_cannot_run_go_elsewhere() -> None:
    pytest.importorskip("numba")
    x, weights = normal(3, 6), FeedForwardWeights(*maps())
    assert reason("feed_forward", x, weights) == ""
    assert "one precision" in reason("feed_forward", x.float(), weights)
    halves = FeedForwardWeights(*[w.bfloat16() for w in weights])
    with torch.autocast("cpu", torch.float16):
        assert "one precision" in reason("feed_forward", x.float(), halves)
    heads, angles = normal(1, 4, 2, 6), torch.zeros(1, 4, 3, dtype=torch.float64)
    assert reason("rotary", heads, angles, angles) == ""
    assert "to angles" in reason("rotary", heads, angles, angles.clone().requires_grad_())


def test_small_maps_gain_nothing_without_gradients() -> None:
    pytest.importorskip("numba")
    gains = OPS["pointwise"].module("numba")[0].gains
    x, weights = normal(3, 6), FeedForwardWeights(*maps())
    assert gains("feed_forward", x, weights)
    with torch.no_grad():
        assert not gains("feed_forward", x, weights)


def test_a_rotation_needs_two_entries_for_each_pair() -> None:
    angles = torch.zeros(1, 4, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="4 pairs need more than 6 entries"):
        rotary(normal(1, 4, 2, 6), angles, angles)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("pairs", [1, 3])
def test_rotation_of_a_slice_equals_the_definition(
    agrees: Callable[..., None], backend: str, rows: int, pairs: int
) -> None:
    joint, angles = normal(3, 4, 3 * 2 * 7).detach(), normal(rows, 4, pairs).detach()

    def run(name: str) -> Callable[[Tensor], Tensor]:
        def call(joint: Tensor) -> Tensor:
            x, turns = joint.unflatten(-1, (3, 2, 7))[:, :, 1], angles.to(joint)
            return rotary(x, turns.cos(), turns.sin(), backend=name)

        return call

    agrees(run(backend), run("reference"), [joint])


@pytest.mark.parametrize("length", [1, 20])
def test_attention_to_parts_of_a_projection_is_that_to_copies(length: int) -> None:
    pytest.importorskip("numba")
    x = normal(2, length, 18)

    def gradient(parts: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 3)) for part in parts)
        return torch.autograd.grad(attention(q, k, v, backend="numba").square().sum(), x)[0]

    copies = tuple(part.contiguous() for part in x.chunk(3, dim=-1))
    assert_close(gradient(x.split([6, 6, 6], dim=-1)), gradient(copies))


def test_operations_are_counted_without_numbers() -> None:
    x, *weights = (t.detach().to("meta") for t in (normal(2, 5, 6), *maps()))
    assert feed_forward(x, FeedForwardWeights(*weights)).shape == (2, 5, 4)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_steps_of_a_linear_map_are_the_map(backend: str, dtype: torch.dtype, biased: bool) -> None:
    """Of few rows and of many, to one rounding of a sum in float32."""
    weight, bias = torch.randn(33, 70).to(dtype), torch.randn(33).to(dtype) if biased else None
    step, exact = (
        linear_stepper(weight, bias, backend=backend),
        bias if bias is None else bias.double(),
    )
    for shape in ((0, 70), (70,), (2, 1, 70), (9, 70)):
        x = torch.randn(shape).to(dtype)
        wanted = F.linear(x.double(), weight.double(), exact)
        assert step(x).dtype == dtype
        assert_close(step(x).double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
    x.requires_grad_()
    assert step(x[:1]).requires_grad
    weight.zero_()
    assert_close(step(x.detach()[:1])[0], torch.zeros(33, dtype=dtype) if bias is None else bias)
