import math

import pytest
import torch

from stateline.ops.positions import (
    UNLIMITED,
    RopeScaling,
    alibi_slopes,
    hard_alibi_windows,
    rotate,
)


def rotated(x: torch.Tensor, position: int, **options: float) -> torch.Tensor:
    """One vector at one position."""
    return rotate(x[None, None, None], torch.tensor([[position]]), **options)[0, 0, 0]


@pytest.mark.parametrize("dims", [2, 4, 8])
def test_rotary_scores_depend_on_the_distance_alone(dims: int) -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    for distance in (0, 1, 7):
        scores = [
            rotated(q, p + distance, dims=dims) @ rotated(k, p, dims=dims) for p in (0, 3, 1000)
        ]
        assert torch.stack(scores).std() < 1e-12


def test_rotary_leaves_the_rest_of_a_head_as_it_is() -> None:
    x = torch.randn(2, 5, 3, 8)
    turned = rotate(x, torch.arange(5)[None], dims=4)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.isclose(turned[:, 1:, :, :4], x[:, 1:, :, :4]).any()


def test_the_first_pair_turns_by_one_radian_per_position() -> None:
    x = torch.zeros(8, dtype=torch.float64)
    x[0] = 1
    for position in (0, 1, 5):
        y = rotated(x, position, dims=8)
        assert y[0].item() == pytest.approx(math.cos(position))
        assert y[4].item() == pytest.approx(math.sin(position))  # entry t pairs with t + dims/2


def test_pair_t_turns_by_base_to_the_minus_2t_over_dims() -> None:
    x = torch.zeros(8, dtype=torch.float64)
    x[1] = 1
    assert rotated(x, 7, dims=4, base=100.0)[3].item() == pytest.approx(math.sin(7 * 100**-0.5))


def test_rotary_takes_a_row_of_positions_per_row() -> None:
    x = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2], [10, 20, 30]])
    turned = rotate(x, positions, dims=4)
    for row in range(2):
        alone = rotate(x[row : row + 1], positions[row : row + 1], dims=4)
        assert torch.equal(turned[row], alone[0])


def test_rotary_angles_stay_exact_in_half_precision() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    x[0] = 1
    y = rotated(x, 1001, dims=2)  # bfloat16 cannot tell 1001 from 1000
    assert y.dtype == torch.bfloat16
    assert y[0].item() == pytest.approx(math.cos(1001), abs=4e-3)


def test_alibi_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]


def test_alibi_slopes_of_sixteen_heads_are_powers_of_the_root_of_a_half() -> None:
    wanted = [2 ** (-h / 2) for h in range(1, 17)]
    assert alibi_slopes(16).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("n_heads", "wanted"),
    [
        (1, [2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-h for h in range(1, 9)] + [2 ** -(h + 0.5) for h in range(4)]),
    ],
)
def test_other_head_counts_take_every_second_slope_of_the_next_power_of_two(
    n_heads: int, wanted: list[float]
) -> None:
    assert alibi_slopes(n_heads).tolist() == pytest.approx(wanted)


HARD_ALIBI = """
1 . . . .  1 . . . .  1 . . . .  1 . . . .
. 1 . . .  1 1 . . .  1 1 . . .  1 1 . . .
. . 1 . .  . 1 1 . .  1 1 1 . .  1 1 1 . .
. . . 1 .  . . 1 1 .  . 1 1 1 .  1 1 1 1 .
. . . . 1  . . . 1 1  . . 1 1 1  1 1 1 1 1
"""
"""Masks of heads 0 to 3 of five tokens, the first three heads masked (Repeat After Me, 2.2)."""


def test_hard_alibi_masks_are_those_of_the_paper() -> None:
    distance = torch.arange(5)[:, None] - torch.arange(5)
    windows = hard_alibi_windows(4, 3)
    masks = [(distance >= 0) & (distance < window) for window in windows]
    rows = [
        "  ".join(" ".join("1" if seen else "." for seen in mask[i]) for mask in masks)
        for i in range(5)
    ]
    assert "\n".join(rows) == HARD_ALIBI.strip()


@pytest.mark.parametrize("masked", [0, 2, 4])
def test_heads_that_are_not_masked_see_everything(masked: int) -> None:
    windows = hard_alibi_windows(4, masked).tolist()
    assert windows == [*range(1, masked + 1), *[UNLIMITED] * (4 - masked)]


def test_linear_scaling_moves_positions_together() -> None:
    x = torch.randn(8, dtype=torch.float64)
    stretched = rotated(x, 12, dims=8, scaling=RopeScaling("linear", 4.0))
    torch.testing.assert_close(stretched, rotated(x, 3, dims=8))


def test_llama3_scaling_leaves_fast_rotations_and_divides_slow_ones() -> None:
    """Turns in the original length: 8 (fast), 2.5 (half way between 1 and 4), 0.5 (slow)."""
    frequency = 2 * math.pi * torch.tensor([8.0, 2.5, 0.5], dtype=torch.float64) / 64
    scaled = RopeScaling("llama3", 8.0, 1.0, 4.0, 64).scale(frequency, 10_000.0)
    wanted = torch.tensor([1.0, 0.5 + 0.5 / 8, 1 / 8], dtype=torch.float64)
    torch.testing.assert_close(scaled / frequency, wanted)


@pytest.mark.parametrize(
    ("truncate", "kept"), [(False, [1, 1, 0.9, 0.4, 0, 0]), (True, [1, 1, 2 / 3, 1 / 3, 0, 0])]
)
def test_yarn_interpolates_between_the_pairs_at_its_limits(
    truncate: bool, kept: list[float]
) -> None:
    """Each pair turns half as fast as the one before: 32 turns at pair 1.8, 8 at pair 3.8."""
    frequency = 2.0 ** -torch.arange(6, dtype=torch.float64)
    original = round(2 * math.pi * 32 * 2**10)
    low, high = 2**10 * 32 / 2**3.8, 2**10 * 32 / 2**1.8
    yarn = RopeScaling("yarn", 8.0, low, high, original, truncate=truncate)
    scaled = yarn.scale(frequency, base=2.0**6)
    wanted = torch.tensor([u + (1 - u) / 8 for u in kept], dtype=torch.float64)
    torch.testing.assert_close(scaled / frequency, wanted, rtol=0, atol=1e-5)
    assert yarn.score_factor == pytest.approx((0.1 * math.log(8) + 1) ** 2)
    assert yarn._replace(attention_factor=1.5).score_factor == 1.5**2
