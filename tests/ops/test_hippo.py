import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.hippo import (
    diagonal_frequencies,
    diagonal_plus_low_rank,
    hippo,
    normal_form,
)


@pytest.mark.parametrize("modes", [1, 2, 3, 8, 32])
def test_legs_frequencies_are_the_negative_spectrum_of_the_normal_part_of_hippo_legs(
    modes: int,
) -> None:
    size = 2 * modes
    hippo = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size):
        hippo[n, n] = -(n + 1)
        for k in range(n):
            hippo[n, k] = -math.sqrt(2 * n + 1) * math.sqrt(2 * k + 1)
    low_rank = torch.tensor([math.sqrt(n + 0.5) for n in range(size)], dtype=torch.float64)
    spectrum = torch.linalg.eigvals(hippo + torch.outer(low_rank, low_rank))
    assert spectrum.real.tolist() == pytest.approx([-0.5] * size, abs=1e-9)
    wanted = sorted(spectrum.imag.tolist())[:modes]
    assert diagonal_frequencies("legs", modes).tolist() == pytest.approx(wanted, rel=1e-6)


def test_lin_frequencies_are_multiples_of_pi() -> None:
    frequencies = diagonal_frequencies("lin", 5).tolist()
    assert frequencies == pytest.approx([0, math.pi, 2 * math.pi, 3 * math.pi, 4 * math.pi])


def test_inv_frequencies_are_those_of_the_paper() -> None:
    # N = 8: N/pi (N/(1 + 2n) - 1) is 8/pi times 7, 5/3, 3/5, 1/7
    wanted = [8 / math.pi * factor for factor in (7, 5 / 3, 3 / 5, 1 / 7)]
    assert diagonal_frequencies("inv", 4).tolist() == pytest.approx(wanted)


def test_frequencies_can_be_computed_where_there_is_no_data() -> None:
    with torch.device("meta"):
        assert diagonal_frequencies("legs", 2).device.type == "cpu"


def test_hippo_legs_is_that_of_the_paper() -> None:
    a, b, p = hippo("legs", 5)
    for n in range(5):
        assert b[n].item() == pytest.approx(math.sqrt(2 * n + 1))
        assert p[0, n].item() == pytest.approx(math.sqrt(n + 0.5))
        for k in range(5):
            below = -math.sqrt(2 * n + 1) * math.sqrt(2 * k + 1)
            assert a[n, k].item() == pytest.approx(below if n > k else -(n + 1) if n == k else 0)


def test_hippo_legt_sees_a_window_of_length_one() -> None:
    """Its state holds the Legendre coefficients of the last unit of time: here, of a constant."""
    size, steps = 8, 2_000
    a, b, _ = hippo("legt", size)
    one, half = torch.eye(size, dtype=torch.float64), a / (2 * steps)
    transition = torch.linalg.solve(one - half, one + half)
    x, drive = torch.zeros(size, dtype=torch.float64), torch.linalg.solve(one - half, b / steps)
    for _ in range(steps):
        x = transition @ x + drive
    assert x.tolist() == pytest.approx([1] + [0] * (size - 1), abs=0.1)


def test_hippo_lagt_is_that_of_the_paper() -> None:
    a, b, p = hippo("lagt", 3)
    assert a.tolist() == [[-0.5, 0, 0], [-1, -0.5, 0], [-1, -1, -0.5]]
    assert b.tolist() == [1, 1, 1]
    assert p.tolist() == [pytest.approx([math.sqrt(0.5)] * 3)]


@pytest.mark.parametrize("measure", ["legs", "legt", "lagt"])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_low_rank_part_makes_it_normal(measure: Any, size: int) -> None:
    a, _, p = hippo(measure, size)
    normal = a + p.mT @ p
    spread = normal + normal.mT - 2 * normal.diagonal().mean() * torch.eye(size)
    assert spread.abs().max() <= 1e-11


@pytest.mark.parametrize("measure", ["legs", "legt", "lagt"])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_diagonal_plus_low_rank_form_is_the_same_system(measure: Any, size: int) -> None:
    """V (Lambda - P P*) V* is A, and V B is B: as the impulse response of any readout shows."""
    a, b, _ = hippo(measure, size)
    values, low_rank, drive = (_complex(t) for t in diagonal_plus_low_rank(measure, size))
    _, vectors = normal_form(measure, size)
    v = torch.cat([_complex(vectors), _complex(vectors).conj()], dim=1)
    both = torch.cat([low_rank, low_rank.conj()], dim=1)
    core = torch.diag(torch.cat([values, values.conj()])) - both.mT @ both.conj()
    assert ((v @ core @ v.mH).real - a).abs().max() <= 1e-9 * a.abs().max()
    assert ((v @ torch.cat([drive, drive.conj()])).real - b).abs().max() <= 1e-9


@pytest.mark.parametrize("measure", ["legs", "legt", "lagt"])
def test_eigenvectors_are_turned_so_that_the_low_rank_part_is_real(measure: Any) -> None:
    _, low_rank, _ = diagonal_plus_low_rank(measure, 8)
    assert (low_rank[0, :, 0] > 0).all()
    assert low_rank[0, :, 1].abs().max() <= 1e-12


def test_the_input_of_legs_is_a_multiple_of_its_low_rank_part() -> None:
    _, low_rank, b = diagonal_plus_low_rank("legs", 64)
    torch.testing.assert_close(b, math.sqrt(2) * low_rank[0], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("unannotated")
def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(InputError, match="unknown measure 'legz': did you mean 'leg"):
        hippo("legz", 4)  # type: ignore[arg-type]


def _complex(planes: Tensor) -> Tensor:
    return torch.complex(planes[..., 0], planes[..., 1])
