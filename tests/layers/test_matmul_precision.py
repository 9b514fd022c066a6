"""Filters that a network computes are exact, whatever precision matrix products may have."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.layers import LAYERS, AnyLayer
from stateline.layers.law.case import chooses
from stateline.layers.mixers import long_conv
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.ops import use_backend
from stateline.ops.diagonal_ssm import pytorch
from tests.layers.test_modes import PATTERNS, tf32

LOWER = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "bfloat16 on the CPU": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "TF32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "TF32 on CUDA": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}


@pytest.fixture(params=LOWER)
def lower(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield LOWER[request.param]
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")  # the older settings, too


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


def products_of_weights(pattern: str) -> tuple[int, float]:
    """Rounded products that signals do not enter, and the error of the outputs."""
    torch.manual_seed(0)
    layer = build_stack(ModelConfig(pattern, vocab_size=2, d_model=16)).eval()
    runs = []
    for _ in range(2):
        x = torch.randn(2, 40, 16)
        with tf32() as products, torch.no_grad(), use_backend("torch"):
            y = layer(x)
        runs.append(products.factors)
    wanted = copy.deepcopy(layer).double()(x.double()).detach()
    same = [
        all(a.equal(b) and bool(a.any()) for a, b in zip(first, second, strict=True))
        for first, second in zip(*runs, strict=not chooses(layer))
    ]
    return sum(same), float((y.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.cpu
@pytest.mark.parametrize("name", PATTERNS)
def test_what_layers_compute_from_weights_alone_is_not_rounded_to_tf32(name: str) -> None:
    """A product with the same factors for other signals is a filter, or a part of one.

    block_recurrent maps the states that it begins with, which are learned, as it maps tokens; moe
    may choose other experts.
    """
    count, error = products_of_weights(PATTERNS[name])
    assert (count > 0) == (name == "block_recurrent")
    assert name == "moe" or error <= 2.0**-9  # four roundings


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["diagonal_ssm", "dss", "gss", "h3", "hyena", "long_conv", "s4d"])
def test_without_the_question_they_would_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (long_conv, pytorch):
        monkeypatch.setattr(module, "rounds_products", lambda: False)
    assert products_of_weights(PATTERNS[name])[0]
