"""What the random walk promises beyond the contract."""

import pytest
import torch

from stateline.errors import InputError
from stateline.tasks import RandomWalk
from stateline.tasks.synthetic.random_walk import FORWARD, LEFT, RESET, RIGHT

HEADINGS = (1, 1j, -1, -1j)
"""Right, down, left, up; rows count downwards."""


def walked(actions: list[int], grid: int) -> list[tuple[int, int]]:
    """Cell and heading after each action, step by step."""
    row, column, heading, found = 0, 0, 1 + 0j, []
    for action in actions:
        if action == RESET:
            row, column, heading = 0, 0, 1 + 0j
        if action in (LEFT, RIGHT):
            heading *= -1j if action == LEFT else 1j
        ahead = (row + int(heading.imag), column + int(heading.real))
        if action == FORWARD and all(0 <= place < grid for place in ahead):
            row, column = ahead
        found.append((row * grid + column, HEADINGS.index(heading)))
    return found


@pytest.mark.parametrize("grid", [2, 3, 8])
def test_labels_are_the_cells_of_the_walk(grid: int) -> None:
    task = RandomWalk(grid=grid, length=300, reset_every=90, batch_size=4)
    tokens, targets = task.train_batch(0)
    places = [walked(row, grid) for row in tokens.tolist()]
    assert (targets - 4).tolist() == [[cell for cell, _ in row] for row in places]

    both = RandomWalk(grid=grid, length=300, reset_every=90, batch_size=4, heading=True)
    same, targets = both.train_batch(0)
    assert torch.equal(same, tokens)
    assert (targets - 4).tolist() == [[4 * cell + way for cell, way in row] for row in places]
    assert targets.max() < both.vocab_size == 4 + 4 * grid**2


def test_every_cell_is_a_label() -> None:
    targets = RandomWalk(grid=3, length=1000, batch_size=8).train_batch(0).targets
    assert sorted(targets.unique().tolist()) == list(range(4, 13))


def test_a_walk_is_reset_after_so_many_actions() -> None:
    tokens = RandomWalk(length=35, reset_every=9).train_batch(0).tokens
    assert (tokens == RESET).all(dim=0).nonzero().flatten().tolist() == [0, 10, 20, 30]
    assert (tokens == RESET).sum() == 4 * len(tokens)


def test_actions_are_uniform() -> None:
    tokens = RandomWalk(length=2000).train_batch(0).tokens
    shares = torch.bincount(tokens[tokens != RESET]) / (tokens != RESET).sum()
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=0.01)


@pytest.mark.parametrize("sizes", [{"grid": 1}, {"length": 0}, {"reset_every": 0}])
def test_sizes_out_of_range_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"to be int of at least [12], got "):
        RandomWalk(**sizes)  # type: ignore[arg-type]


def test_with_resets_the_longest_row_is_a_whole_walk() -> None:
    assert RandomWalk(length=16, reset_every=40, reset=True).eval_lengths == (16, 32, 41)
    assert RandomWalk(length=16, reset_every=15, reset=True).eval_lengths == (16,)
    assert RandomWalk(length=16, reset_every=7, reset=True).eval_lengths == (16,)
    assert RandomWalk(length=16, reset_every=40).eval_lengths == (16, 32, 64)


def test_a_quarter_in_which_nothing_is_asked_has_no_score() -> None:
    task = RandomWalk(length=16, reset_every=5, reset=True)
    _, targets = task.labelled(16, 0)
    assert task.score(targets, targets) == {"accuracy": 1.0}
