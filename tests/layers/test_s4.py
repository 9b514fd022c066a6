"""S4, against HiPPO itself."""

import numpy as np
import pytest
import torch

from stateline.errors import InputError
from stateline.layers import S4, S4SSM
from stateline.ops.hippo import hippo

WIDTH = 3


def states_of_hippo(size: int, dt: float, u: np.ndarray) -> np.ndarray:
    """States of HiPPO-LegS under the bilinear rule, in its own basis."""
    a, b, _ = (np.asarray(t) for t in hippo("legs", size))
    one, x, states = np.eye(size), np.zeros(size), []
    for u_t in u:
        x = np.linalg.solve(one - dt / 2 * a, (one + dt / 2 * a) @ x + dt * b * u_t)
        states.append(x)
    return np.stack(states)


def test_a_new_layer_reads_the_states_of_hippo() -> None:
    """Lambda - P P* and B are HiPPO in another basis: every readout is one of its states."""
    layer = S4SSM(1, d_state=6).double()
    with torch.no_grad():
        layer.log_dt.fill_(np.log(0.1))
        layer.skip.zero_()
    u = torch.randn(1, 40, 1, dtype=torch.float64)
    states = states_of_hippo(6, 0.1, u.flatten().cpu().numpy())
    y = layer(u).detach().flatten().cpu().numpy()
    readout, *_ = np.linalg.lstsq(states, y, rcond=None)
    np.testing.assert_allclose(states @ readout, y, atol=1e-6)


def test_no_transition_of_a_new_layer_grows() -> None:
    """One step makes no state longer, as |(1 + z/2)/(1 - z/2)| <= 1 for the normal part."""
    layer = S4SSM(WIDTH, d_state=64).double()
    state = layer.init_state(4)
    h = torch.randn_like(state.h)
    after = layer.step(torch.zeros(4, WIDTH, dtype=torch.float64), state._replace(h=h))[1].h
    assert (after.norm(dim=(-2, -1)) <= h.norm(dim=(-2, -1))).all()


def test_transitions_are_shared_in_turn() -> None:
    layer = S4SSM(4, d_state=4, n_ssm=2)
    assert layer.p.shape == layer.b.shape == (2, 2, 2)
    _, a, p, b, c = layer.weights()
    for channel in range(4):
        assert torch.equal(p[channel], layer.p[channel % 2])
        assert torch.equal(b[channel], b[channel % 2])
        assert torch.equal(a[channel], a[channel % 2])
    assert c.shape == (4, 2, 2)


def test_its_parameters_but_the_readout_have_an_optimizer_group_of_their_own() -> None:
    names = {name for name, _ in S4SSM(WIDTH).named_parameters()}
    assert names - set(S4SSM.optimizer_groups) == {"c", "skip"}
    assert set(S4SSM.optimizer_groups.values()) == {"ssm"}


def test_its_parameters_stay_float32_in_a_module_that_is_cast_down() -> None:
    layer = S4(WIDTH, d_state=4).bfloat16()
    assert {p.dtype for p in layer.ssm.parameters()} == {torch.float32}
    assert layer.out_proj.weight.dtype == torch.bfloat16


@pytest.mark.usefixtures("unannotated")
def test_options_that_do_not_fit_are_refused() -> None:
    for options, message in (
        ({"d_state": 5}, "d_state must be a positive even number, got d_state=5"),
        ({"n_ssm": 2}, "n_ssm must divide d_model, got n_ssm=2 and d_model=3"),
        ({"dt_min": 1.0}, "0 < dt_min <= dt_max"),
    ):
        with pytest.raises(InputError, match=message):
            S4(WIDTH, **options)
