"""What is not finite stays in its document and flows to no earlier position, in any layer."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stateline.layers import LAYERS, AnyLayer
from stateline.ops import use_backend
from tests.layers.test_contract import KINDS, make

LENGTH, PLACE = 14, 6
BORDERS = [[4, 10], [3, 12]]
"""Where the documents of both rows begin; the position ``PLACE`` of the first row is spoilt."""


def documents(kind: str) -> tuple[AnyLayer, Tensor, Tensor, Tensor]:
    """A layer, an input, starts, and gradients of its outputs."""
    layer = make(kind).double().eval()
    x = layer.example_input(2, LENGTH)
    starts = torch.zeros(2, LENGTH, dtype=torch.bool)
    for row, places in enumerate(BORDERS):
        starts[row, places] = True
    return layer, x, starts, torch.randn_like(layer(x))


def spoilt(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[0, PLACE] = value
    return x


def others(begin: int, end: int) -> Tensor:
    """All positions but some of the first row."""
    kept = torch.ones(2, LENGTH, dtype=torch.bool)
    kept[0, begin:end] = False
    return kept


def gradient(run: Callable[[Tensor], Tensor], x: Tensor, of_outputs: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(run(x), x, of_outputs)[0]


def same(found: Tensor, wanted: Tensor, kept: Tensor) -> None:
    torch.testing.assert_close(found[kept], wanted[kept], rtol=1e-6, atol=1e-8)


QUICK = ("attention", "gated_delta_net", "long_conv", "mamba", "mamba2", "rwkv7")


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS]
)
def test_documents_do_not_see_each_other_whatever_they_hold(
    kind: str, backend: str, value: float
) -> None:
    with use_backend(backend):
        check(kind, value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_nor_by_the_definitions(kind: str) -> None:
    with use_backend("reference"):
        check(kind, math.inf)


def check(kind: str, value: float) -> None:
    layer, x, starts, grad = documents(kind)
    with torch.no_grad():
        begun = layer.forward_chunk(layer.example_input(2, 3), layer.init_state(2))[1]

    def whole(x: Tensor) -> Tensor:
        return layer(x, starts=starts)

    def chunk(x: Tensor) -> Tensor:
        return layer.forward_chunk(x, begun, starts=starts)[0]

    def chunks(x: Tensor) -> Tensor:
        """The spoilt document ends the first chunk."""
        outputs, state = [], begun
        for part in (slice(None, BORDERS[0][1]), slice(BORDERS[0][1], None)):
            y, state = layer.forward_chunk(x[:, part], state, starts=starts[:, part])
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    for run in (whole, chunk, chunks):
        earlier, document = others(PLACE, BORDERS[0][1]), others(*BORDERS[0])
        same(run(spoilt(x, value)), run(x), earlier)
        for kept in (earlier, document):
            of_others = grad * kept[..., None]
            found = gradient(run, spoilt(x, value), of_others)
            same(found, gradient(run, x, of_others), kept)
        found = gradient(run, x, spoilt(grad, value))
        same(found, gradient(run, x, grad * document[..., None]), document)
        assert not found[0, BORDERS[0][0] : PLACE + 1].isfinite().all()
