from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import LSTMCell, LSTMWeights, lstm

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
    def call(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Outputs:
        y, after = lstm(x, LSTMWeights(*weights), LSTMCell(h, c), backend=backend)
        return y, *after

    return call


def as_operator(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Outputs:
    """What runs under ``torch.compile``."""
    outputs, cells = torch.ops.stateline.lstm(x, *weights, h, c).unbind(dim=0)
    return outputs, outputs[:, -1], cells[:, -1]


PATHS = {"torch": run("torch"), "operator": as_operator}


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
    found = run("reference")(x, h, c, *weights)
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
    x, h, c, *weights = (t.float() for t in case(2))
    inputs = [x, *weights, h, c]
    backward = torch.ops.stateline.lstm_backward.default
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(backward, (torch.ones(2, 2, 2, 5), *inputs), test_utils=rules)
    leaves = [t.requires_grad_() for t in inputs]
    torch.library.opcheck(torch.ops.stateline.lstm.default, leaves, test_utils=rules)


NAMES = ["x", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh"]


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_do_not_fit_are_refused(
    backend: str, axis: int, change: int, name: str
) -> None:
    """PyTorch's kernel would access memory out of bounds."""
    inputs = dict(zip(NAMES, case(3, batch=2), strict=True))
    tensor = inputs[name]
    axis = 2 if (name, axis) == ("x", 1) else min(axis, tensor.ndim - 1)  # any length is right
    shape = list(tensor.shape)
    shape[axis] += change
    inputs[name] = tensor.new_zeros(shape)
    with pytest.raises(InputError, match=r"^lstm(: weights.w_hh)? needs .*, got \("):
        run(backend)(*inputs.values())


def test_tensors_of_two_precisions_are_refused() -> None:
    inputs = case(3)
    inputs[4] = inputs[4].float()
    with pytest.raises(InputError, match="one dtype, got"):
        run("torch")(*inputs)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_empty_sequence_leaves_the_state(backend: str) -> None:
    x, h, c, *weights = case(3)
    y, *after = run(backend)(x[:, :0], h, c, *weights)
    assert y.shape == (2, 0, 5)
    torch.testing.assert_close(after, [h, c], rtol=0, atol=0)
