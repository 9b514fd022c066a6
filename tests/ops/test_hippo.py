import math

import pytest
import torch

from stateline.ops.hippo import diagonal_frequencies


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
