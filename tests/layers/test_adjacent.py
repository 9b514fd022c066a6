"""On a GPU, projections write signals in the layout of the kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stateline.layers import H3
from stateline.layers.mixers import adjacent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU."""
    monkeypatch.setattr(adjacent, "_on_gpu", lambda _: True)


@pytest.mark.usefixtures("gpu")
def test_times_are_adjacent_before_and_channels_after_the_core() -> None:
    x, linear = torch.randn(2, 5, 3), nn.Linear(3, 6)
    inner = adjacent.to_adjacent(linear, x)
    torch.testing.assert_close(inner, linear(x))
    for part in inner.chunk(3, dim=-1):
        assert part.stride() == (30, 1, 5)
    back = nn.Linear(6, 3)
    y = adjacent.from_adjacent(back, inner)
    torch.testing.assert_close(y, back(inner))
    assert y.is_contiguous()


def test_the_layer_stays_the_same(request: pytest.FixtureRequest) -> None:
    layer, x = H3(8, d_state=4).double(), torch.randn(2, 5, 8, dtype=torch.float64)

    def run() -> list[Tensor]:
        y = layer(x)
        z, state = layer.forward_chunk(x[:, :3], layer.init_state(2))
        gradients = torch.autograd.grad((y.square().sum() + z.sum()), [*layer.parameters()])
        return [y, z, state.diagonal.h, *gradients]

    wanted = run()
    request.getfixturevalue("gpu")
    torch.testing.assert_close(run(), wanted)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("which", ["to_adjacent", "from_adjacent"])
def test_the_replacement_of_a_linear_map_is_called(which: str) -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    run: Callable[[nn.Linear, Tensor], Tensor] = getattr(adjacent, which)
    adapter, x = Adapter(3, 3), torch.randn(1, 2, 3)
    torch.testing.assert_close(run(adapter, x), adapter(x))
