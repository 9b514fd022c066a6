"""DSS: its kernels, against the formulas of the paper."""

import numpy as np
import pytest
import torch

from stateline.errors import InputError
from stateline.layers import DSS
from stateline.layers.mixers.dss import DSSFilter, DSSModes, DSSRecurrence
from stateline.ops.hippo import hippo

WIDTH, TAPS = 2, 24


def core(**options: object) -> DSSModes:
    torch.manual_seed(0)
    layer = DSS(WIDTH, d_state=3, dt_min=0.1, dt_max=1.0, filter_len=TAPS, **options)  # type: ignore[arg-type]
    return layer.ssm.double()


def kernel(layer: DSSModes, length: int) -> np.ndarray:
    """Impulse response (output, length) without the skip connection."""
    impulses = torch.zeros(1, length, WIDTH, dtype=torch.float64)
    impulses[:, 0] = 1
    with torch.no_grad():
        layer.skip.zero_()
        return np.asarray(layer(impulses)[0].T.cpu())


def complex_parameters(layer: DSSModes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lambda (mode), its parts times the steps (channel, mode), W (channel, mode)."""
    spectrum, steps = layer.modes()
    return tuple(
        np.asarray((t[..., 0] + 1j * t[..., 1]).detach().cpu()) for t in (spectrum, steps, layer.c)
    )


def test_exponentials_are_weighted_and_summed() -> None:
    layer = core()
    spectrum, delta, w = complex_parameters(layer)
    waves = np.exp(delta[..., None] * np.arange(30))
    wanted = np.einsum("hn,hnl->hl", w * (np.exp(delta) - 1) / spectrum, waves).real
    np.testing.assert_allclose(kernel(layer, 30), wanted, rtol=0, atol=1e-12)


def test_without_scale_the_weights_are_plain() -> None:
    layer = core(kernel="clip", scale=False)
    _, delta, w = complex_parameters(layer)
    wanted = np.einsum("hn,hnl->hl", w, np.exp(delta[..., None] * np.arange(30))).real
    np.testing.assert_allclose(kernel(layer, 30), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("real", [-0.5, 0.3])
def test_a_softmax_over_time_is_weighted_and_summed(real: float) -> None:
    """Of falling modes and of rising ones; up to the epsilon that keeps it finite."""
    layer = core(kernel="softmax")
    with torch.no_grad():
        layer.real[1:] = real
    spectrum, delta, w = complex_parameters(layer)
    waves = np.exp(delta[..., None] * np.arange(TAPS))
    softmax = waves / waves.sum(axis=-1, keepdims=True)
    wanted = np.einsum("hn,hnl->hl", w / spectrum, softmax).real
    np.testing.assert_allclose(kernel(layer, TAPS), wanted, rtol=0, atol=1e-5)


def test_a_softmax_ends_after_its_taps_and_refuses_no_length() -> None:
    found = kernel(core(kernel="softmax"), TAPS + 9)
    assert np.abs(found[:, :TAPS]).min() > 0
    assert np.abs(found[:, TAPS:]).max() < 1e-12


def test_modes_that_grow_fast_do_not_overflow() -> None:
    layer = core(kernel="softmax")
    with torch.no_grad():
        layer.real.fill_(300.0)
    x = torch.randn(1, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert all(torch.isfinite(t).all() for t in (y, *gradients))


def test_the_state_of_a_softmax_is_the_inputs_that_it_reaches() -> None:
    layer = DSS(WIDTH, kernel="softmax", filter_len=TAPS)
    assert layer.state_bytes(5) == layer.state_bytes(500) == (TAPS - 1) * WIDTH * 4
    assert isinstance(layer.ssm, DSSFilter)
    assert isinstance(DSS(WIDTH).ssm, DSSRecurrence)


def test_clip_cuts_the_real_part_and_its_gradient() -> None:
    layer = core(kernel="clip")
    with torch.no_grad():
        layer.real.copy_(torch.tensor([-0.5, 0.0, 2.0]))
    spectrum, _ = layer.modes()
    assert spectrum[:, 0].tolist() == pytest.approx([-0.5, 0.0, 1e-4])
    spectrum[:, 0].sum().backward()
    assert layer.real.grad is not None
    assert layer.real.grad.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["exp", "clip", "softmax"])
@pytest.mark.parametrize("exp_frequency", [False, True])
def test_modes_begin_as_the_upper_half_of_hippo(kind: str, exp_frequency: bool) -> None:
    spectrum, _ = core(kernel=kind, exp_frequency=exp_frequency).modes()
    assert spectrum[:, 0].tolist() == pytest.approx([-0.5] * 3)
    a, _, p = hippo("legs", 6)
    turns = torch.linalg.eigvals(a + p.mT @ p).imag
    wanted = sorted(w for w in turns.tolist() if w > 0)
    assert sorted(spectrum[:, 1].tolist()) == pytest.approx(wanted, rel=1e-6)


def test_the_parts_may_have_steps_of_their_own() -> None:
    apart, tied = core(), core(tie_dt=True)
    assert (apart.log_dt.shape, tied.log_dt.shape) == ((WIDTH, 2), (WIDTH, 1))
    spectrum, steps = apart.modes()
    torch.testing.assert_close(steps / spectrum, apart.log_dt.exp()[:, None].expand_as(steps))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "sofmax"}, "kernel to be one of exp, clip, softmax, got 'sofmax'"),
        ({"kernel": "softmax", "scale": False}, "take kernel='exp' or 'clip' for scale=False"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DSS(WIDTH, **options)  # type: ignore[arg-type]
