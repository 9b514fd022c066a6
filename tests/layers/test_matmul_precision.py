"""Filters that a network computes are exact, whatever precision matrix products may have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import LAYERS, AnyLayer

LOWER = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "bfloat16 on the CPU": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "TF32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(params=LOWER)
def lower(request: pytest.FixtureRequest) -> Iterator[Any]:
    levels = torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [level.fp32_precision for level in levels]
    yield LOWER[request.param]
    for level, own in zip(levels, before, strict=True):
        level.fp32_precision = own


def filters(layer: AnyLayer) -> list[Tensor]:
    """Taps of the filters inside, and their gradients."""
    inner = next(m for m in layer.modules() if hasattr(m, "taps") and hasattr(m, "w_hidden"))
    taps = inner.taps()
    weight = torch.linspace(-1, 1, taps.numel(), dtype=taps.dtype).view_as(taps)
    return [taps.detach(), *torch.autograd.grad((taps * weight).sum(), list(inner.parameters()))]


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["long_conv", "hyena"])
def test_filters_do_not_depend_on_the_precision_of_products(
    name: str, lower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every processor rounds if it may, so here all products in float32 do."""
    linear = F.linear

    def rounded(*given: Tensor) -> Tensor:
        return linear(*(x.bfloat16().float() if x.dtype == torch.float32 else x for x in given))

    torch.manual_seed(0)
    layer = LAYERS[name](8)
    lower()
    monkeypatch.setattr(F, "linear", rounded)
    found = filters(layer)
    for ours, exact in zip(found, filters(layer.double()), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(
            ours.double(), exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max())
        )
