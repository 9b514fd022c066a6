"""Ops on parameters and single entries, against their definitions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.ops import discretize, shift_taps, use_backend

BACKENDS = ["numba", "torch"]
CHANNELS, COPIES, MODES = 6, 2, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def parameters(scale: float = 1.0) -> list[Tensor]:
    log_dt = normal(CHANNELS) - 2
    decay = scale * normal(COPIES, MODES).exp()
    return [log_dt, decay, scale * normal(COPIES, MODES), normal(COPIES, MODES, 2)]


def gradients(run: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum() for y in outputs)
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_discretisation_equals_the_definition(backend: str, rule: Any, scale: float) -> None:
    inputs = parameters(scale)
    found = discretize(*inputs, rule, backend=backend)
    wanted = discretize(*inputs, rule, backend="reference")
    assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    one, other = (
        gradients(lambda *x, b=b: discretize(*x, rule, backend=b), inputs)
        for b in (backend, "reference")
    )
    assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_gradients_of_the_discretisation_are_those_of_differences(rule: Any) -> None:
    inputs = [x.requires_grad_() for x in parameters()]
    assert torch.autograd.gradcheck(lambda *x: discretize(*x, rule, backend="numba"), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("log_dt", "decay"), [(-60.0, 1.0), (-45.0, 1.0), (-3.0, 0.0)])
def test_discretisation_of_tiny_steps_is_the_limit_and_has_finite_gradients(
    backend: str, log_dt: float, decay: float
) -> None:
    inputs = [torch.tensor([log_dt]), *torch.full((2, 1, 1), decay), torch.ones(1, 1, 2)]
    _, b = discretize(*inputs, "zoh", backend=backend)
    assert_close(b, torch.full_like(b, log_dt).exp())
    found = gradients(lambda *x: discretize(*x, "zoh", backend=backend), inputs)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("convolved", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 37])
def test_taps_equal_the_definition(convolved: str, size: int) -> None:
    inputs = [normal(3, size), normal(3, size), normal(3)]
    with use_backend(short_conv=convolved):
        found = shift_taps(*inputs)
        one = gradients(shift_taps, inputs)
    assert_close(found, shift_taps(*inputs, backend="reference"))
    other = gradients(lambda *x: shift_taps(*x, backend="reference"), inputs)
    assert_close(one, other)
