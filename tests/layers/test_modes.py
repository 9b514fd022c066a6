"""Every layer in the modes in which models run: each gives what it gives in float64."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.layers import ATTENTION_WRAPPERS, LAYERS, WRAPPERS
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig

WIDTH, LENGTH = 16, 24
EXACT, ROUNDED = 2.0**-13, 2.0**-4
"""Limits of errors, relative to the largest entry: float32, and products of bfloat16 in a chain."""

PATTERNS = {
    **{name: name for name in LAYERS},
    **{name: f"{name}({'attention' if name in ATTENTION_WRAPPERS else 'h3'})" for name in WRAPPERS},
    "value_residual": "value_residual(rwkv7*2)",
}


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def matmul_precision(value: str) -> Any:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def default_dtype(value: torch.dtype) -> Any:
    return setting(torch.get_default_dtype, torch.set_default_dtype, value)


MODES: dict[str, tuple[Callable[[], Any], float]] = {
    "grad": (torch.enable_grad, EXACT),
    "no_grad": (torch.no_grad, EXACT),
    "inference": (torch.inference_mode, EXACT),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), ROUNDED),
    "high": (lambda: matmul_precision("high"), ROUNDED),
    "medium": (lambda: matmul_precision("medium"), ROUNDED),
    "default float64": (lambda: default_dtype(torch.float64), EXACT),
    "default bfloat16": (lambda: default_dtype(torch.bfloat16), EXACT),
    "default device": (lambda: torch.device("meta"), EXACT),
    "deterministic": (
        lambda: setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        EXACT,
    ),
}


@cache
def case(name: str) -> tuple[Any, Tensor, Tensor]:
    """A layer, its input, and its output in float64."""
    torch.manual_seed(0)
    layer = build_stack(ModelConfig(PATTERNS[name], vocab_size=2, d_model=WIDTH)).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        return layer, x, copy.deepcopy(layer).double()(x.double())


def read(layer: Any, x: Tensor, verb: str) -> Tensor:
    if verb == "forward":
        return layer(x)
    first, state = layer.forward_chunk(x[:, :-2], layer.init_state(len(x), capacity=2))
    third, state = layer.step(x[:, -2], state)
    last = (
        layer.step(x[:, -1], state)[0] if torch.is_grad_enabled() else layer.step_(x[:, -1], state)
    )
    return torch.cat([first, third[:, None], last[:, None]], dim=1)


# PyTorch says once that norms of autocast's products are not fused with weights in float32.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_layer_keeps_its_precision_in_every_mode(name: str, mode: str) -> None:
    layer, x, wanted = case(name)
    context, limit = MODES[mode]
    for verb in ("forward", "steps") if layer.causal else ("forward",):
        with context():
            found = read(copy.deepcopy(layer), x.clone(), verb)
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= limit, (verb, float(error))


def gradients(layer: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer = copy.deepcopy(layer)
    layer(x).square().sum().backward()
    given = [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return torch.cat([(g.double() / (g.abs().max() + 1e-30)).flatten() for g in given])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "mode", ["grad", "high", "medium", "default float64", "default bfloat16", "default device"]
)
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients_keep_their_precision_in_every_mode(name: str, mode: str) -> None:
    layer, x, _ = case(name)
    context, limit = MODES[mode]
    wanted = gradients(copy.deepcopy(layer).double(), x.double())
    with context():
        found = gradients(layer, x)
    assert (found - wanted).abs().max() <= 2 * limit


@pytest.mark.parametrize("name", PATTERNS)
def test_every_layer_has_its_shapes_without_numbers(name: str) -> None:
    layer, x, wanted = case(name)
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == wanted.shape
