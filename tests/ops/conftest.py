"""Comparing a backend with the reference: outputs, and the gradients of every input."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError

collect_ignore = [] if find_spec("triton") else ["compile_kernels.py"]

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def _run(
    function: Function, inputs: Sequence[Tensor], place: torch.device | str = "cpu", **options: Any
) -> list[Tensor]:
    """Outputs, then the gradients of a random projection of them, all in float64 on the CPU.

    A backend that cannot run the call on the device of ``--device`` skips the test.
    """
    leaves = [t.detach().to(place, copy=True).requires_grad_() for t in inputs]
    given = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in options.items()}
    try:
        outputs = function(*leaves, **given)
    except InputError as error:
        if torch.device(place).type != "cpu" and "cannot run this call" in str(error):
            pytest.skip(str(error))
        raise
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(0)
    projected = torch.zeros((), dtype=torch.float64, device=place)
    for y in outputs:  # weights that half precision can represent
        weight = torch.randn(y.shape, generator=generator).bfloat16().double().to(place)
        projected = projected + (y.double() * weight).sum()
    gradients = torch.autograd.grad(projected, leaves, allow_unused=True, materialize_grads=True)
    return [t.detach().double().cpu() for t in (*outputs, *gradients)]


@pytest.fixture(scope="session")
def agrees(device: torch.device) -> Callable[..., None]:
    """Asserts that a function equals the definition, in outputs and gradients.

    In float64 to 1e-12, in float32 to 5e-6 of the definition in float64, relative to the largest
    entry (of at least 1).
    """

    def check(
        function: Function, definition: Function, inputs: Sequence[Tensor], **options: object
    ) -> None:
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
            given = [t.to(dtype) for t in inputs]
            found = _run(function, given, device, **options)
            wanted = _run(definition, [t.double() for t in given], **options)
            for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
                error = (a - b).abs().max() / b.abs().max().clamp(min=1.0)
                assert error <= limit, f"tensor {index} in {dtype}: error {error:.1e}"

    return check


@pytest.fixture(scope="session")
def rounds_well(device: torch.device) -> Callable[..., None]:
    """Asserts that half precision costs at most twice what it costs the definition.

    The first ``halved`` inputs are in half precision, the others in float32. ``factor`` is the
    limit for gradients.
    """

    def check(
        function: Function,
        definition: Function,
        inputs: Sequence[Tensor],
        *,
        halved: int = 1,
        factor: float = 2.0,
        **options: object,
    ) -> None:
        for half in (torch.bfloat16, torch.float16):
            given = [t.to(half if i < halved else torch.float32) for i, t in enumerate(inputs)]
            truth = _run(definition, [t.double() for t in given], **options)
            rounded = _run(definition, given, **options)
            found = _run(function, given, device, **options)
            outputs = len(truth) - len(inputs)
            for index, (a, r, t) in enumerate(zip(found, rounded, truth, strict=True)):
                allowed = 2.0 if index < outputs else factor
                floor = 1e-5 * t.abs().max()  # what float32 arithmetic costs
                error, own = (a - t).abs().max(), (r - t).abs().max()
                assert error <= allowed * own + floor, f"{half}, tensor {index}: {error} > {own}"

    return check


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs are the same in every run."""
    torch.manual_seed(0)
