"""A sequence in chunks: the same outputs and gradients, and no long sequence inside."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.layers import H3, S4D, Attention, Ladder, Stack, StatePassing
from stateline.layers.base import AnyLayer
from stateline.layers.compose import checkpoint_activations
from stateline.layers.state import nbytes


def core() -> Stack:
    torch.manual_seed(0)
    return Stack(H3(8, d_state=4, d_head=2), S4D(8, d_state=4), Attention(8)).double()


def with_gradients(layer: AnyLayer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    leaves = [x, *layer.parameters()]
    return [
        y,
        *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), leaves),
    ]


@pytest.mark.parametrize("chunk_len", [1, 5, 16, 40])
@pytest.mark.parametrize("recomputed", [False, True])
def test_outputs_and_gradients_are_those_of_the_whole(chunk_len: int, recomputed: bool) -> None:
    inner, x = core(), torch.randn(2, 23, 8, dtype=torch.float64)
    layer = StatePassing(inner, chunk_len=chunk_len)
    checkpoint_activations(Stack(layer), recomputed)
    for found, wanted in zip(with_gradients(layer, x), with_gradients(inner, x), strict=True):
        assert_close(found, wanted)


def test_the_core_never_sees_more_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, plain = [], S4D.forward_chunk

    def note(self: S4D, x: Tensor, state: Any) -> Any:
        lengths.append(x.shape[1])
        return plain(self, x, state)

    monkeypatch.setattr(S4D, "forward_chunk", note)
    layer = StatePassing(S4D(4), chunk_len=6)
    layer(torch.randn(1, 15, 4))
    layer.forward_chunk(torch.randn(1, 7, 4), layer.init_state(1))
    assert lengths == [6, 6, 3, 6, 1]


def saved(layer: AnyLayer, length: int) -> int:
    """Numbers that are kept for the backward pass, besides the input."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(1, length, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum()
    sizes.pop(x.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def test_with_recomputation_only_states_are_kept_of_every_chunk() -> None:
    layer = StatePassing(Ladder(S4D(8, d_state=4), passes=4), chunk_len=64)
    whole = saved(layer, 1024)
    layer.checkpoints_activations = True
    assert saved(layer, 1024) < whole / 8


def test_with_recomputation_nothing_grows_but_inputs_outputs_and_a_state_per_chunk() -> None:
    layer = StatePassing(Stack(*(H3(8, d_state=4, d_head=2) for _ in range(3))), chunk_len=64)
    layer.checkpoints_activations = True
    assert saved(layer, 2048) - saved(layer, 1024) <= 1024 // 64 * nbytes(layer.init_state(1))


def test_an_empty_input_stays_empty() -> None:
    layer = StatePassing(S4D(4), chunk_len=2)
    assert layer.forward_chunk(torch.zeros(1, 0, 4), layer.init_state(1))[0].shape == (1, 0, 4)
