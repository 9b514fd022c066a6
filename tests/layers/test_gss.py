import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import GSS, LAYERS


def impulse_response(layer: GSS, length: int) -> Tensor:
    """Re sum_n C_n (e^L_n - 1) / L_n e^(L_n t), entry by entry: (channel, length)."""
    ssm = layer.ssm
    frequency = ssm.frequency.exp() if ssm.exp_frequency else ssm.frequency
    modes = torch.complex(-ssm.log_decay.exp(), frequency)
    c = torch.complex(ssm.c[..., 0], ssm.c[..., 1])
    powers = torch.exp(modes[:, None] * torch.arange(length))
    return torch.einsum("cn,nl->cl", c * (modes.exp() - 1) / modes, powers).real


@pytest.mark.parametrize("exp_frequency", [True, False])
def test_the_state_space_model_is_the_kernel_of_the_paper(exp_frequency: bool) -> None:
    layer = GSS(8, d_ssm=3, d_state=5, exp_frequency=exp_frequency).double()
    x = torch.randn(2, 11, 3, dtype=torch.float64)
    with torch.no_grad():
        kernel = impulse_response(layer, 11)
        wanted = layer.ssm.skip * x
        for t in range(11):
            for s in range(t + 1):
                wanted[:, t] += kernel[:, t - s] * x[:, s]
        torch.testing.assert_close(layer.ssm(x), wanted, rtol=1e-10, atol=1e-10)


def test_the_widths_of_the_paper_are_the_defaults() -> None:
    layer = GSS(1024)
    assert layer.gate.out_features == 4096
    assert layer.ssm.c.shape == (256, 512, 2)


def test_it_wants_no_feed_forward() -> None:
    assert not LAYERS["gss"].wants_feed_forward


def test_the_state_has_a_constant_size() -> None:
    layer = GSS(8, d_state=5)
    assert layer.state_bytes(1) == layer.state_bytes(10_000) == 2 * 5 * 2 * 4


def test_the_transition_has_the_optimizer_group_of_state_space_models() -> None:
    assert dict(GSS(8).ssm.optimizer_groups) == {"log_decay": "ssm", "frequency": "ssm"}


def test_a_narrow_layer_reads_earlier_inputs() -> None:
    """The norm of a single number is zero, whatever it is."""
    layer, x = GSS(4, d_state=3), torch.randn(1, 2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[:, 1].sum(), x)
    assert gradient[:, 0].any()


def test_a_width_of_one_is_refused() -> None:
    with pytest.raises(InputError, match="d_ssm must be at least 2, got d_ssm=1"):
        GSS(8, d_ssm=1)
