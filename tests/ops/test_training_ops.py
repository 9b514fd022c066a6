"""Ops that serve training: the feed-forward, the cross entropy, and joint projections."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.ops import OPS, attention, cross_entropy, feed_forward
from stateline.ops.joined import parts_of, side_by_side

BACKENDS = ["numba", "torch"]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def maps(width: int = 6, hidden: int = 37) -> list[Tensor]:
    return [normal(hidden, width), normal(hidden), normal(4, hidden), normal(4)]


def reason(name: str, *inputs: Tensor) -> str:
    return OPS[name].reasons(name, *inputs)["numba"]


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
        lambda *x: feed_forward(*x, backend=backend),
        lambda *x: feed_forward(*x, backend="reference"),
        [t.detach() for t in inputs],
    )


@pytest.mark.parametrize("classes", [1, 10, 70])
def test_the_cross_entropy_is_its_definition(backend: str, classes: int) -> None:
    rows = -(-(1 << 16) // classes) if classes > 10 else 40
    logits, targets = normal(rows, classes), torch.randint(-1, classes, (rows,))
    losses = [cross_entropy(logits, targets, backend=name) for name in (backend, "reference")]
    assert_close(*losses)
    assert_close(*(torch.autograd.grad(3 * loss, logits)[0] for loss in losses))


def test_impossible_classes_have_no_gradient() -> None:
    pytest.importorskip("numba")
    logits = torch.tensor([[0.0, -torch.inf, -1e30, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0]), backend="numba")
    (gradient,) = torch.autograd.grad(loss, logits)
    assert_close(gradient, torch.tensor([[-0.5, 0.0, 0.0, 0.5]]), rtol=0, atol=1e-7)
    assert gradient[0, 1] == gradient[0, 2] == 0


def test_a_logit_that_is_no_number_gives_no_loss() -> None:
    pytest.importorskip("numba")
    logits = torch.zeros(2, 10)
    logits[1, 3] = torch.nan
    assert cross_entropy(logits, torch.tensor([1, 1]), backend="numba").isnan()


def test_calls_that_the_kernels_cannot_run_go_elsewhere() -> None:
    pytest.importorskip("numba")
    x, weights = normal(3, 6), maps()
    assert reason("feed_forward", x, *weights) == ""
    assert "one precision" in reason("feed_forward", x.float(), *weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in reason("feed_forward", x, *weights)
    with torch.no_grad():
        assert "without a gradient" in reason("feed_forward", x, *weights)
    logits = normal(2, 5)
    assert reason("cross_entropy", logits, torch.tensor([4, -1])) == ""
    assert "must be a class" in reason("cross_entropy", logits, torch.tensor([5, 1]))
    assert "few logits" in reason("cross_entropy", normal(2, 50), torch.tensor([5, 1]))


def test_gradients_side_by_side_are_joined_as_they_are() -> None:
    x = normal(2, 3, 6)
    parts = parts_of(x, [4, 1, 1])
    rooms = [room.tensor for room in side_by_side(x.dtype, *parts)]
    for room in rooms:
        room.copy_(torch.randn_like(room))
    (joined,) = torch.autograd.grad(parts, x, rooms)
    assert joined.data_ptr() == rooms[0].data_ptr()
    assert joined.equal(torch.cat(rooms, dim=-1))


def test_gradients_from_elsewhere_are_joined_too() -> None:
    x = normal(2, 3, 6)
    rooms = [torch.randn(2, 3, n, dtype=x.dtype) for n in (4, 1, 1)]
    (joined,) = torch.autograd.grad(parts_of(x, [4, 1, 1]), x, rooms)
    assert joined.equal(torch.cat(rooms, dim=-1))
    _, middle, _ = parts_of(x, [4, 1, 1])
    (alone,) = torch.autograd.grad(middle.sum(), x)
    assert alone.equal(torch.tensor([0, 0, 0, 0, 1, 0], dtype=x.dtype).expand_as(x))


@pytest.mark.parametrize("length", [1, 20])
def test_attention_to_parts_of_a_projection_is_that_to_copies(length: int) -> None:
    pytest.importorskip("numba")
    x = normal(2, length, 18)

    def gradient(parts: tuple[Tensor, ...]) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 3)) for part in parts)
        return torch.autograd.grad(attention(q, k, v, backend="numba").square().sum(), x)[0]

    copies = tuple(part.contiguous() for part in x.chunk(3, dim=-1))
    assert_close(gradient(parts_of(x, [6, 6, 6])), gradient(copies))
