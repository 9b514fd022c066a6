"""Every backend of every op is its definition: outputs and gradients of the op's example call."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stateline import ops
from stateline.ops import OPS
from stateline.ops.op import Sizes

SIZES = Sizes(2, 37, 16, torch.empty(0).device)
BACKENDS = [(op, b) for op in OPS for b in OPS[op].backends if b != "reference"]


def cases(name: str) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The function of an op, its arguments, and options: with packed rows where it has them."""
    torch.manual_seed(0)
    example = OPS[name].example(SIZES)
    function = getattr(ops, example.function or name)
    starts = torch.zeros(SIZES.batch, SIZES.length, dtype=torch.bool, device=SIZES.device)
    starts[0, [0, 5, 6, 30]] = starts[1, 11] = True
    yield function, example.inputs, {}
    if "starts" in signature(function).parameters:
        yield function, example.inputs, {"starts": starts}


def with_gradients(inputs: Any) -> Any:
    """Copies of the arguments, of which real tensors require gradients."""
    leaves, tree = tree_flatten(inputs)
    copied = [t.detach().clone().requires_grad_() if is_real(t) else t for t in leaves]
    return tree_unflatten(copied, tree)


def is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def run(function: Any, inputs: Any, options: Any, backend: str) -> list[Tensor]:
    """Outputs, and gradients of their product with fixed numbers."""
    given = with_gradients(inputs)
    real = [t for t in tree_flatten(given)[0] if is_real(t)]
    found = tree_flatten(function(*given, **options, backend=backend))[0]
    outputs = [y for y in found if isinstance(y, Tensor) and y.requires_grad]
    torch.manual_seed(1)
    weights = [torch.randn(y.shape, dtype=y.dtype, device=y.device) for y in outputs]
    gradients = torch.autograd.grad(outputs, real, weights, allow_unused=True)
    return [t for t in (*found, *gradients) if t is not None]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_is_the_definition(name: str, backend: str) -> None:
    for function, inputs, options in cases(name):
        inputs = with_gradients(inputs)
        given = (*inputs, options["starts"]) if options else inputs
        if reason := OPS[name].reasons(function.__name__, *given)[backend]:
            pytest.skip(reason)
        wanted = run(function, inputs, options, "reference")
        for got, right in zip(run(function, inputs, options, backend), wanted, strict=True):
            limit = 2e-4 * float(right.detach().abs().max()) if right.numel() else 0.0
            torch.testing.assert_close(got, right, atol=limit, rtol=1e-4)
