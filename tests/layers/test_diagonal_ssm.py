"""Parameters, initial values and discretisation, against complex arithmetic."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import H3, S4D, DiagonalSSM
from stateline.ops.hippo import diagonal_frequencies

WIDTH = 3


def as_complex(planes: Tensor) -> Tensor:
    return torch.complex(planes[..., 0], planes[..., 1])


def random_ssm(**options: Any) -> DiagonalSSM:
    """All parameters random, so that nothing is one or zero by chance."""
    torch.manual_seed(0)
    layer = DiagonalSSM(WIDTH, d_state=8, **options).double()
    with torch.no_grad():
        for parameter in (layer.b, layer.log_decay, layer.frequency):
            parameter.add_(torch.randn_like(parameter))
    return layer


def kernel(layer: DiagonalSSM, length: int) -> Tensor:
    """Impulse response from the continuous parameters, as in the papers."""
    dt = layer.log_dt.exp()[:, None]
    a = torch.complex(-layer.log_decay.exp(), layer.frequency)
    b, c = as_complex(layer.b), as_complex(layer.c)
    if layer.settings.discretization == "zoh":
        a_bar, b_bar = (dt * a).exp(), (torch.exp(dt * a) - 1) / a * b
    else:
        a_bar, b_bar = (1 + dt * a / 2) / (1 - dt * a / 2), dt * b / (1 - dt * a / 2)
    powers = a_bar[..., None] ** torch.arange(length)
    response = 2 * torch.einsum("hn,hnl->hl", c * b_bar, powers).real
    response[:, 0] += layer.skip
    return response


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_the_impulse_response_is_that_of_the_discretised_model(discretization: str) -> None:
    layer = random_ssm(discretization=discretization)
    impulses = torch.zeros(1, 12, WIDTH, dtype=torch.float64)
    impulses[:, 0] = 1
    torch.testing.assert_close(layer(impulses)[0].T, kernel(layer, 12))


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_discretisation_is_that_of_the_paper(discretization: str) -> None:
    layer = random_ssm(discretization=discretization)
    log_a, b, c = (as_complex(t) for t in layer.weights())
    z = layer.log_dt.exp()[:, None] * torch.complex(-layer.log_decay.exp(), layer.frequency)
    b_in = as_complex(layer.b)
    if discretization == "zoh":
        wanted = z.exp(), (z.exp() - 1) / z * layer.log_dt.exp()[:, None] * b_in
    else:
        wanted = (1 + z / 2) / (1 - z / 2), layer.log_dt.exp()[:, None] * b_in / (1 - z / 2)
    torch.testing.assert_close(log_a.exp(), wanted[0])
    torch.testing.assert_close(b, wanted[1])
    torch.testing.assert_close(c, as_complex(layer.c))


def test_fast_oscillations_are_discretised_without_branch_cuts() -> None:
    """|Im z| above 2 turns the bilinear angle beyond a right angle."""
    layer = random_ssm()
    with torch.no_grad():
        layer.frequency.copy_(torch.tensor([1.0, 300.0, -300.0, 1e5]).repeat(WIDTH, 1))
        layer.log_dt.fill_(math.log(0.1))
    impulses = torch.zeros(1, 9, WIDTH, dtype=torch.float64)
    impulses[:, 0] = 1
    torch.testing.assert_close(layer(impulses)[0].T, kernel(layer, 9))


@pytest.mark.cpu
@pytest.mark.parametrize("init", ["lin", "inv", "legs"])
def test_initial_values_are_those_of_the_official_code(init: Any) -> None:
    layer = DiagonalSSM(200, d_state=8, init=init)
    assert (-layer.log_decay.exp()).flatten().tolist() == pytest.approx([-0.5] * 800)
    for row in (0, 199):
        assert torch.equal(layer.frequency[row], diagonal_frequencies(init, 4))
    assert torch.equal(layer.b[..., 0], torch.ones(200, 4))
    assert torch.equal(layer.b[..., 1], torch.zeros(200, 4))
    assert layer.c.var().item() == pytest.approx(0.5, rel=0.15)
    assert layer.skip.var().item() == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize(
    ("transform", "decay"),
    [
        ("exp", lambda p: math.exp(p)),
        ("none", lambda p: p),
        ("relu", lambda p: max(p, 0) + 1e-4),
        ("sigmoid", lambda p: 1 / (1 + math.exp(-p))),
        ("softplus", lambda p: math.log(1 + math.exp(p))),
    ],
)
def test_every_transform_begins_with_a_real_part_of_minus_one_half(
    transform: Any, decay: Callable[[float], float]
) -> None:
    layer = DiagonalSSM(WIDTH, d_state=2, real_transform=transform, discretization="zoh").double()
    for parameter in (layer.log_decay.flatten()[0].item(), 0.7):
        with torch.no_grad():
            layer.log_decay.fill_(parameter)
        found = layer.weights()[0][..., 0] / layer.log_dt.exp()[:, None]
        assert found.flatten().tolist() == pytest.approx([-decay(parameter)] * WIDTH, rel=1e-6)
    assert decay(DiagonalSSM(1, d_state=2, real_transform=transform).log_decay.item()) == (
        pytest.approx(0.5)
    )


def test_channels_share_transitions_in_turn() -> None:
    """Channel h has number h modulo n_ssm."""
    layer = DiagonalSSM(6, d_state=4, n_ssm=3, discretization="zoh").double()
    with torch.no_grad():
        layer.frequency.add_(torch.randn_like(layer.frequency))
        layer.b.add_(torch.randn_like(layer.b))
        layer.log_dt.fill_(0.0)
    assert layer.frequency.shape == (3, 2)
    log_a, b, _ = layer.weights()
    for channel in range(6):
        assert torch.equal(log_a[channel, :, 1], layer.frequency[channel % 3])
        assert torch.equal(b[channel], b[channel % 3])


def test_a_second_output_is_a_second_readout_of_the_same_state() -> None:
    both = random_ssm(n_outputs=2)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    y = both(x)
    assert y.shape == (2, 7, 2 * WIDTH)
    for part in (0, 1):
        alone = random_ssm()
        values = {**both.state_dict()}
        values["c"], values["skip"] = both.c.chunk(2)[part], both.skip.chunk(2)[part]
        alone.load_state_dict(values)
        torch.testing.assert_close(y.chunk(2, dim=-1)[part], alone(x))


def test_a_small_step_loses_no_digits() -> None:
    """Zero-order hold of a slow mode: B-bar is nearly dt, which e^z - 1 in float32 is not."""
    layer = DiagonalSSM(1, d_state=2, discretization="zoh")
    with torch.no_grad():
        layer.log_dt.fill_(math.log(1e-5))
    assert layer.weights()[1].flatten().tolist() == pytest.approx([1e-5, 0], rel=1e-5, abs=1e-12)


def test_steps_are_drawn_log_uniformly_from_their_range() -> None:
    log_dt = DiagonalSSM(4000, d_state=2, dt_min=1e-3, dt_max=1e-1).log_dt
    assert math.log(1e-3) <= log_dt.min()
    assert log_dt.max() <= math.log(1e-1)
    assert log_dt.mean().item() == pytest.approx(math.log(1e-2), abs=0.1)


def test_the_parameters_of_the_recurrence_have_an_optimizer_group_of_their_own() -> None:
    groups = dict.fromkeys(("log_dt", "log_decay", "frequency", "b"), "ssm")
    assert dict(DiagonalSSM.optimizer_groups) == groups
    assert set(dict(DiagonalSSM(WIDTH).named_parameters())) == {*groups, "c", "skip"}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_parameters_stay_float32_in_a_module_that_is_cast_down(half: torch.dtype) -> None:
    for outer in (S4D(WIDTH), H3(WIDTH)):
        outer.to(half)
        for module in outer.modules():
            own = {p.dtype for p in module.parameters(recurse=False)}
            assert own <= {torch.float32 if getattr(module, "keeps_float32", False) else half}
    assert {p.dtype for p in S4D(WIDTH).to(half).ssm.parameters()} == {torch.float32}


def test_parameters_follow_a_cast_up() -> None:
    assert {p.dtype for p in S4D(WIDTH).double().parameters()} == {torch.float64}


@pytest.mark.cpu
def test_parameters_follow_to_another_device() -> None:
    moved = S4D(WIDTH).to(device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    assert moved.ssm.c.dtype == torch.float32


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_state": 3}, "d_state must be a positive even number, got d_state=3"),
        ({"d_state": 1}, "d_state must be a positive even number, got d_state=1"),
        ({"dt_min": 0.2}, "steps must have 0 < dt_min <= dt_max, got dt_min=0.2 and dt_max=0.1"),
        ({"init": "leg"}, "KIND wants init to be one of lin, inv, legs, got 'leg'"),
        (
            {"discretization": "ZOH"},
            "KIND wants discretization to be one of zoh, bilinear, got 'ZOH'",
        ),
    ],
)
def test_options_that_no_diagonal_ssm_can_have_are_refused(
    options: dict[str, Any], message: str
) -> None:
    for kind in (DiagonalSSM, S4D, H3):
        with pytest.raises(InputError) as caught:
            kind(WIDTH, **options)
        assert str(caught.value) == message.replace("KIND", kind.__name__)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ssm": 2}, "n_ssm must divide d_model, got n_ssm=2 and d_model=3"),
        (
            {"real_transform": "log"},
            "KIND wants real_transform to be one of exp, none, relu, sigmoid, softplus, got 'log'",
        ),
    ],
)
def test_transitions_and_outputs_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str
) -> None:
    for kind in (DiagonalSSM, S4D):
        with pytest.raises(InputError) as caught:
            kind(WIDTH, **options)
        assert str(caught.value) == message.replace("KIND", kind.__name__)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "gate"}, "S4D wants output to be one of linear, glu, half_glu, got 'gate'"),
        ({"output": "half_glu", "n_outputs": 2}, "got 6 signals and d_model=3; take 'glu'"),
    ],
)
def test_a_map_across_channels_that_does_not_fit_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        S4D(WIDTH, **options)


def test_the_maps_across_channels_are_a_line_and_two_gates() -> None:
    x = torch.randn(2, 5, WIDTH)
    for output in ("linear", "glu", "half_glu"):
        layer = S4D(WIDTH, d_state=4, output=output)
        z = torch.nn.functional.gelu(layer.ssm(x))
        w, b = layer.out_proj.weight, layer.out_proj.bias
        line = z @ w[:WIDTH].T + b[:WIDTH]
        wanted = {
            "linear": line,
            "glu": line * torch.sigmoid(z @ w[WIDTH:].T + b[WIDTH:]) if output == "glu" else line,
            "half_glu": z * torch.sigmoid(line),
        }[output]
        torch.testing.assert_close(layer(x), wanted)
