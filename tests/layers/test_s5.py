"""S5 and its initial values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers import S5, S5SSM
from stateline.ops.hippo import hippo

WIDTH = 3


def as_complex(planes: Tensor) -> np.ndarray:
    return np.asarray(torch.complex(planes[..., 0], planes[..., 1]).detach().cpu())


def response(layer: S5SSM, length: int, *, expand: float) -> np.ndarray:
    """Impulse response (length, output, input) from the continuous parameters, as in the paper."""
    dt = layer.log_dt.exp().detach().cpu().numpy()
    a = layer.real.detach().cpu().numpy() + 1j * layer.frequency.detach().cpu().numpy()
    b, c = as_complex(layer.b), as_complex(layer.c)
    b_bar = ((np.exp(dt * a) - 1) / a)[:, None] * b
    powers = np.exp(dt * a) ** np.arange(length)[:, None]
    kernel = expand * np.einsum("op,lp,pi->loi", c, powers, b_bar).real
    kernel[0] += np.diag(layer.skip.detach().cpu().numpy())
    return kernel


@pytest.mark.parametrize(("conj_sym", "expand"), [(True, 2.0), (False, 1.0)])
def test_the_impulse_response_is_that_of_the_discretised_model(
    conj_sym: bool, expand: float
) -> None:
    layer = S5SSM(WIDTH, d_state=8, n_blocks=2, conj_sym=conj_sym).double()
    impulses = torch.zeros(WIDTH, 12, WIDTH, dtype=torch.float64)
    impulses[:, 0] = torch.eye(WIDTH)
    y = layer(impulses).detach().permute(1, 2, 0).cpu().numpy()
    np.testing.assert_allclose(y, response(layer, 12, expand=expand), rtol=0, atol=1e-12)


def test_without_symmetry_all_modes_are_there_and_the_response_is_the_same() -> None:
    """Both halves of a conjugate-symmetric system, read alike, give what one half gives twice."""
    half, whole = S5SSM(WIDTH, d_state=6), S5SSM(WIDTH, d_state=6, conj_sym=False)
    mirror = torch.tensor([1.0, -1.0])
    whole.load_state_dict(
        {
            "log_dt": half.log_dt.repeat(2),
            "real": half.real.repeat(2),
            "frequency": torch.cat([half.frequency, -half.frequency]),
            "b": torch.cat([half.b, half.b * mirror]),
            "c": torch.cat([half.c, half.c * mirror], dim=1),
            "skip": half.skip,
        }
    )
    x = torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(whole(x), half(x))


def test_the_spectrum_is_that_of_hippo_once_per_block() -> None:
    layer = S5SSM(WIDTH, d_state=12, n_blocks=3)
    a, _, p = hippo("legs", 4)
    spectrum = torch.linalg.eigvals(a + p.mT @ p)
    wanted = sorted(w for w in spectrum.imag.tolist() if w < 0) * 3
    assert layer.frequency.tolist() == pytest.approx(wanted, rel=1e-6)
    assert layer.real.tolist() == pytest.approx([-0.5] * 6)


def test_eigenvalues_are_kept_from_growing_unless_asked_not_to() -> None:
    for clip, largest in ((True, -1e-4), (False, 1.0)):
        layer = S5SSM(WIDTH, d_state=4, clip_eigs=clip)
        with torch.no_grad():
            layer.real.fill_(1.0)
        growth = layer.weights()[0][:, 0] / layer.log_dt.exp()
        assert growth.tolist() == pytest.approx([largest] * 2)


def test_its_parameters_but_the_readout_have_an_optimizer_group_of_their_own() -> None:
    names = {name for name, _ in S5SSM(WIDTH).named_parameters()}
    assert names - set(S5SSM.optimizer_groups) == {"c", "skip"}


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_state": 6, "n_blocks": 2}, "n_blocks=2 and d_state=6"),
        ({"discretization": "zho"}, "discretization to be one of zoh, bilinear, got 'zho'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        S5(WIDTH, **options)  # type: ignore[arg-type]
