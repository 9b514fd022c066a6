import math

import pytest
import torch

from stateline.errors import InputError
from stateline.layers import Hyena, LongConv
from stateline.layers.mixers.long_conv import ImplicitFilters


def filters(**options: int) -> ImplicitFilters:
    return ImplicitFilters(3, **{"filter_len": 5, "d_hidden": 4, **options}).double()


@pytest.mark.parametrize("n_filters", [1, 2])
def test_every_channel_is_convolved_with_each_of_its_filters(n_filters: int) -> None:
    layer, x = filters(n_filters=n_filters), torch.randn(2, 9, 3, dtype=torch.float64)
    with torch.no_grad():
        taps = layer.taps().view(n_filters, 3, 5)
        wanted = torch.zeros(2, 9, n_filters, 3, dtype=torch.float64)
        for t in range(9):
            for lag in range(min(t + 1, 5)):
                wanted[:, t] += taps[:, :, lag] * x[:, t - lag, None]
        torch.testing.assert_close(layer(x), wanted.flatten(2))


def test_a_filter_is_a_window_times_a_network_of_the_position() -> None:
    layer = filters(filter_len=6)
    with torch.no_grad():
        h = torch.sin(layer.frequency * (layer.features @ layer.w_in.T + layer.b_in))
        for weight, bias in zip(layer.w_hidden, layer.b_hidden, strict=True):
            h = torch.sin(layer.frequency * (h @ weight.T + bias))
        decay = torch.exp(-torch.arange(6)[:, None] / 5 * layer.rates)
        wanted = (decay * (h @ layer.w_out.T)).T
        wanted[:, 0] += layer.skip
        torch.testing.assert_close(layer.taps(), wanted)


def test_it_sees_filter_len_inputs_and_no_more() -> None:
    impulse = torch.zeros(1, 9, 3, dtype=torch.float64)
    impulse[:, 0] = 1
    y = filters()(impulse)[0].detach()
    assert (y[:5].abs() > 1e-9).all()
    assert y[5:].abs().max() < 1e-12


def test_the_filter_does_not_depend_on_the_length_of_the_input() -> None:
    layer, x = filters(), torch.randn(1, 40, 3, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, :3]), layer(x)[:, :3])


def test_a_sequence_computes_as_many_taps_as_it_has_tokens() -> None:
    layer, x = filters(filter_len=50), torch.randn(1, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(layer.first_taps(7), layer.taps()[:, :7])
    layer(x).sum().backward()
    assert layer.features.grad is not None
    assert layer.features.grad[:7].abs().min() > 0
    assert layer.features.grad[7:].abs().max() == 0


def test_windows_decay_to_a_hundredth_within_their_parts_of_the_filter() -> None:
    layer = ImplicitFilters(7, n_filters=2, filter_len=1001)
    windows = torch.exp(-layer.times[:, None] * layer.rates)
    assert windows[300, -1].item() == pytest.approx(0.01, rel=1e-4)
    assert windows[-1, 0].item() == pytest.approx(0.01 ** (1 / 1.5), rel=1e-4)


def test_features_are_the_time_and_waves_over_the_filter() -> None:
    features = ImplicitFilters(1, filter_len=8, n_features=5).features.detach()
    assert torch.allclose(features[:, 0], torch.arange(8) / 7)
    turns = torch.tensor([1e-4, 1.0]) * 2 * math.pi * 3 / 8
    assert torch.allclose(features[3, 1:3], turns.cos())
    assert torch.allclose(features[3, 3:], -turns.sin())


def test_the_state_is_the_latest_inputs_however_many_filters_read_them() -> None:
    layer, x = LongConv(3, n_filters=4, filter_len=5), torch.randn(2, 9, 3)
    _, state = layer.forward_chunk(x, layer.init_state(2))
    assert torch.equal(state.past, x[:, -4:])
    assert layer.state_bytes(1) == 4 * 3 * 4


def test_filters_stay_float32_under_a_cast_to_half_precision() -> None:
    layer = LongConv(3, filter_len=5).bfloat16()
    assert {p.dtype for p in layer.ssm.parameters()} == {torch.float32}
    assert {b.dtype for b in layer.ssm.buffers()} == {torch.float32}


def test_autocast_leaves_the_filters_alone() -> None:
    layer = filters().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = layer.taps()
    assert torch.equal(inside, layer.taps())


@pytest.mark.parametrize("n_features", [1, 4])
def test_features_come_as_the_time_and_pairs(n_features: int) -> None:
    with pytest.raises(InputError, match="n_features must be odd and at least 3"):
        filters(n_features=n_features)


def test_hyena_is_its_equations() -> None:
    layer, x = Hyena(3, filter_len=4).double(), torch.randn(2, 9, 3, dtype=torch.float64)

    def convolved(taps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for t in range(9):
            for lag in range(min(t + 1, taps.shape[1])):
                y[:, t] += taps[:, lag] * x[:, t - lag]
        return y

    with torch.no_grad():
        joint = x @ layer.in_proj.weight.T + layer.in_proj.bias
        joint = convolved(layer.conv.kernel, joint) + layer.conv.bias
        gate, k, v = joint[..., :3], joint[..., 3:6], joint[..., 6:]
        y = gate * convolved(layer.filters.taps(), k * v)
        wanted = y @ layer.out_proj.weight.T + layer.out_proj.bias
        torch.testing.assert_close(layer(x), wanted)
