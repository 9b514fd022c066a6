"""Gradients of gradients, as penalties of gradients and meta-learning need them."""

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.layers.base import SequenceLayer
from stateline.ops import use_backend


def second(layer: SequenceLayer, x: Tensor) -> list[Tensor]:
    """Gradients of the squared gradients, which weights of the output make depend on the input."""
    y = layer(x)
    leaves = [x, *layer.parameters()]
    score = (y * torch.arange(float(y.shape[-1]))).sum()
    found = torch.autograd.grad(score, leaves, create_graph=True, materialize_grads=True)
    squares = torch.stack([g.square().sum() for g in found]).sum()
    return list(torch.autograd.grad(squares, leaves, materialize_grads=True))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "block_recurrent"])
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    """Except of block-recurrent layers, which PyTorch's own attention refuses."""
    torch.manual_seed(0)
    layer = LAYERS[name](16).double().eval()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    try:
        found = second(layer, x)
    except InputError as error:
        assert str(error).startswith("this kernel has first derivatives only")  # noqa: PT017
        return
    with use_backend("reference"):
        wanted = second(layer, x)
    for g, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, right, rtol=1e-9, atol=1e-9)
