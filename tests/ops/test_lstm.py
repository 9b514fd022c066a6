from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import OPS, lstm

Outputs = tuple[Tensor, Tensor, Tensor]


def case(length: int, width: int = 5, batch: int = 2, seed: int = 0) -> list[Tensor]:
    """Input, output and cell before it, weights; float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4 * width
    shapes = [(batch, length, 3), (batch, width), (batch, width), (rows, 3), (rows, width)]
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) * 0.7
        for shape in [*shapes, (rows,), (rows,)]
    ]


def run(backend: str) -> Callable[..., Outputs]:
    return lambda *inputs: lstm(*inputs, backend=backend)


def as_operator(*inputs: Tensor) -> Outputs:
    """What runs under ``torch.compile``."""
    outputs, cells = torch.ops.stateline.lstm(*inputs).unbind(dim=0)
    return outputs, outputs[:, -1], cells[:, -1]


PATHS = {name: run(name) for name in OPS["lstm"] if name != "reference"}
PATHS["operator"] = as_operator


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=15)
@given(length=st.sampled_from([1, 2, 3, 7, 13, 19]), width=st.integers(1, 5))
def test_equals_the_definition(
    agrees: Callable[..., None], path: str, length: int, width: int
) -> None:
    agrees(PATHS[path], run("reference"), case(length, width))


def test_the_definition_is_pytorchs_lstm() -> None:
    x, h, c, *weights = case(7)
    layer = torch.nn.LSTM(3, 5, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    y, (h_last, c_last) = layer(x, (h[None], c[None]))
    found = lstm(x, h, c, *weights, backend="reference")
    for a, b in zip(found, (y, h_last[0], c_last[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("path", [*PATHS, "reference"])
def test_two_chunks_are_the_whole(path: str) -> None:
    function = PATHS.get(path, run("reference"))
    x, h, c, *weights = case(9)
    whole = run("reference")(x, h, c, *weights)
    for cut in range(1, 9):
        head, *state = function(x[:, :cut], h, c, *weights)
        tail, *after = function(x[:, cut:], *state, *weights)
        chunked = torch.cat([head, tail], dim=1), *after
        for a, b in zip(chunked, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_outputs_cost_no_more_than_twice_the_definitions(
    rounds_well: Callable[..., None], path: str
) -> None:
    """Gradients of both are noise of the recurrence: the layer keeps float32."""
    inputs = case(13)
    rounds_well(PATHS[path], run("reference"), inputs, halved=len(inputs), factor=10.0)


@pytest.mark.usefixtures("unannotated")
def test_the_operators_keep_pytorchs_rules() -> None:
    inputs = [t.float() for t in case(2)]
    backward = torch.ops.stateline.lstm_backward.default
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(backward, (torch.ones(2, 2, 2, 5), *inputs), test_utils=rules)
    leaves = [t.requires_grad_() for t in inputs]
    torch.library.opcheck(torch.ops.stateline.lstm.default, leaves, test_utils=rules)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("d_in", [1, 2, 4])
def test_inputs_of_another_width_are_refused(d_in: int) -> None:
    """PyTorch's kernel takes them, and computes with memory that is not theirs."""
    x, *others = case(3)
    with pytest.raises(InputError, match=rf"must be 3 wide, got \(2, 3, {d_in}\)"):
        lstm(x.new_zeros(*x.shape[:2], d_in), *others)
