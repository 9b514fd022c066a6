"""What object collision promises beyond the contract; the official sample is a matter of parity."""

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.tasks import IGNORE, ObjectCollision


def told(task: ObjectCollision, *steps: list[int]) -> list[int]:
    """Labels at the ends of steps: row, column, colour twice, and the colours asked about."""
    base = torch.tensor([0, task.grid, 2 * task.grid] * 2 + [2 * task.grid + task.n_colors] * 2)
    tokens = (torch.tensor(steps) + base).reshape(1, -1)
    targets = task.targets(tokens).reshape(-1, 8)
    assert (targets[:, :-1] == IGNORE).all()
    return [int(t) if t == IGNORE else int(t) - task.n_inputs for t in targets[:, -1]]


def steps_of(task: ObjectCollision) -> Tensor:
    return task.labelled(800, 0).tokens.reshape(-1, 100, 8)


@pytest.mark.parametrize(("cell", "quadrant"), [((7, 7), 0), ((7, 8), 1), ((8, 7), 2), ((8, 8), 3)])
def test_a_label_is_the_quadrant_of_the_meeting(cell: tuple[int, int], quadrant: int) -> None:
    assert told(ObjectCollision(), [*cell, 1, *cell, 2, 1, 2]) == [quadrant]


def test_the_last_meeting_counts_however_long_ago() -> None:
    apart = [0, 0, 1, 5, 5, 2, 1, 2]
    first, last = [0, 0, 1, 0, 0, 2, 1, 2], [15, 15, 1, 15, 15, 2, 1, 2]
    assert told(ObjectCollision(), first, apart, last, apart, apart) == [0, 0, 3, 3, 3]


def test_colours_count_as_they_were_at_the_meeting_and_in_that_order() -> None:
    met = [0, 0, 1, 0, 0, 2, 1, 2]
    recoloured, turned = [0, 0, 3, 5, 5, 4, 1, 2], [0, 0, 3, 5, 5, 4, 2, 1]
    assert told(ObjectCollision(), met, recoloured, turned) == [0, 0, IGNORE]


def test_nothing_is_told_of_colours_that_never_met() -> None:
    assert told(ObjectCollision(), [0, 0, 1, 0, 1, 2, 1, 2]) == [IGNORE]


def test_particles_move_a_little_at_a_time_and_stay_inside() -> None:
    task = ObjectCollision()
    rows, columns = steps_of(task)[..., [0, 3]], steps_of(task)[..., [1, 4]] - 16
    for places in (rows, columns):
        assert (places.min(), places.max()) == (0, 15)
        moved = places.diff(dim=1).abs()
        assert moved.max() <= 3  # five deviations of 0.5, rounded
        assert (moved > 0).float().mean() > 0.2


def test_colours_change_in_one_step_of_twenty() -> None:
    changed = (steps_of(ObjectCollision(n_colors=50))[..., 2].diff(dim=1) != 0).float().mean()
    assert changed == pytest.approx(0.05 * 49 / 50, abs=0.01)


def test_questions_are_about_the_last_meeting_in_two_of_five_and_any_in_the_others() -> None:
    """Before there is one, the question is about no colour at all."""
    task = ObjectCollision(grid=200)
    asked = steps_of(task)[..., 6:] - 2 * task.grid - task.n_colors
    nothing = (asked == -1).all(dim=2)
    assert nothing.float().mean() == pytest.approx(0.4, abs=0.02)
    assert ((asked == -1).any(dim=2) == nothing).all()
    assert len(asked[~nothing].unique(dim=0)) == 25


@pytest.mark.parametrize("length", [0, 7, 12])
def test_a_length_of_broken_steps_is_refused(length: int) -> None:
    message = f"length must be a multiple of the 8 tokens of a step, got length={length}"
    with pytest.raises(InputError, match=message):
        ObjectCollision(length=length)
    with pytest.raises(InputError, match=message):
        ObjectCollision().labelled(length, 0)


@pytest.mark.parametrize("sizes", [{"grid": 1}, {"n_colors": 0}, {"batch_size": 0}])
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"to be int of at least [12], got "):
        ObjectCollision(**sizes)
