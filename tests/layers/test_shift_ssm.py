import math

import pytest
import torch
from torch import Tensor

from stateline.layers import ShiftSSM

WIDTH = 3


def random_ssm(d_state: int) -> ShiftSSM:
    torch.manual_seed(0)
    layer = ShiftSSM(WIDTH, d_state=d_state).double()
    with torch.no_grad():
        layer.b.normal_()
    return layer


def by_recurrence(layer: ShiftSSM, x: Tensor) -> Tensor:
    """x_t = S x_{t-1} + B u_t, y_t = C x_t + D u_t with the shift matrix written out."""
    size = layer.b.shape[1]
    shift = torch.zeros(size, size, dtype=x.dtype)
    for i in range(1, size):
        shift[i, i - 1] = 1
    state, outputs = torch.zeros(len(x), WIDTH, size, dtype=x.dtype), []
    for u in x.unbind(dim=1):
        state = state @ shift.T + layer.b * u[..., None]
        outputs.append((layer.c * state).sum(dim=-1) + layer.skip * u)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("d_state", [1, 2, 5, 20])
def test_the_filter_is_the_state_space_model(d_state: int) -> None:
    layer, x = random_ssm(d_state), torch.randn(2, 11, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_recurrence(layer, x))


def test_it_sees_d_state_inputs_and_no_more() -> None:
    layer = random_ssm(4)
    impulse = torch.zeros(1, 9, WIDTH, dtype=torch.float64)
    impulse[:, 0] = 1
    y = layer(impulse)[0].detach()
    assert (y[:4].abs() > 1e-6).all()
    assert y[4:].abs().max() < 1e-12


def test_the_state_is_the_latest_inputs() -> None:
    layer, x = ShiftSSM(WIDTH, d_state=4), torch.randn(2, 9, WIDTH)
    _, state = layer.forward_chunk(x, layer.init_state(2))
    assert torch.equal(state.past, x[:, -3:])


def test_initial_values_are_those_of_the_official_code() -> None:
    layer = ShiftSSM(2000, d_state=16)
    assert torch.equal(layer.b, torch.eye(16)[0].repeat(2000, 1))
    assert layer.c.abs().max() <= 1 / math.sqrt(16)
    assert layer.c.var().item() == pytest.approx(1 / 16 / 3, rel=0.1)  # uniform
    assert layer.skip.var().item() == pytest.approx(1.0, rel=0.15)


def test_b_has_the_optimizer_group_of_state_space_models() -> None:
    assert dict(ShiftSSM.optimizer_groups) == {"b": "ssm"}


def test_parameters_stay_float32_under_a_cast_to_half_precision() -> None:
    layer = ShiftSSM(WIDTH).bfloat16()
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert layer(torch.randn(1, 3, WIDTH).bfloat16()).dtype == torch.bfloat16
