"""Mixing matrices: the weights by which the heads of a layer sum their values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import LAYERS, Attention, GatedDeltaNet
from stateline.layers.mixers.convolved import ConvolvedValues
from stateline.layers.mixers.heads import MixesValues
from stateline.layers.mixers.linear_attention import MatrixAttention

MIXING = sorted(name for name, kind in LAYERS.items() if issubclass(kind, MixesValues))
MORE: dict[str, dict[str, Any]] = {
    "attention": {"n_heads": 4, "n_kv_heads": 2, "position": "rope", "d_head": 6},
    "mamba2": {"expand": 1, "d_head": 4, "d_state": 8},
}


def test_attention_and_recurrences_with_heads_of_values_have_mixing_matrices() -> None:
    assert {"attention", "linear_attention", "mamba2", "gated_delta_net"} <= {*MIXING}


def summed(weights: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("bhts,bshd->bthd", weights, values)


@pytest.mark.parametrize("name", MIXING)
def test_the_matrix_times_the_values_is_what_the_layer_reads(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](16, **MORE.get(name, {})).double().eval()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    found: list[Any] = []
    read = "_merge" if isinstance(layer, Attention) else "read"
    own = getattr(layer, read)
    setattr(layer, read, lambda *given: found.extend(given) or own(*given))
    with torch.no_grad():
        layer(x)
        weights = layer.mixing(x)
        assert weights.triu(1).abs().max() < 1e-12
        if isinstance(layer, Attention):
            values = layer._project(x)[2].repeat_interleave(2, dim=2)
        elif isinstance(layer, MatrixAttention):
            values = layer.signals(x, layer.init_state(2))[2]
        else:
            assert isinstance(layer, ConvolvedValues)
            mixed, *others = layer.project(x)
            signals, needed = layer.signals(layer.conv(mixed), *others)
            values = needed[0] if name == "mamba2" else signals[0].v
        y = found[0]
        if name == "mamba2":
            y = y + layer.skip[:, None] * values
        if name in ("linear_attention", "mlstm"):
            whole, values = y, values[..., :-1]
            least = torch.zeros(()) if name == "linear_attention" else (-found[1][1]).exp()
            divisor = torch.maximum(whole[..., -1].abs(), least) + (name != "mlstm") * 1e-6
            y = whole[..., :-1] / divisor[..., None]
    torch.testing.assert_close(summed(weights, values), y, rtol=0, atol=1e-6)


def test_a_value_that_is_written_several_times_has_no_single_weight() -> None:
    with pytest.raises(InputError, match="one weight for n_products=1 alone"):
        GatedDeltaNet(16, n_products=2).mixing(torch.randn(1, 3, 16))
