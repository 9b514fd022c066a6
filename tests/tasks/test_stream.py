"""Episodes that follow one another: where rows go on, and where they begin anew."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.tasks import IGNORE, Algorithm, ConsecutiveBatch, Episode, RandomWalk, StreamTask
from stateline.tasks.synthetic.stream import SEGMENTS

END = Algorithm().words.index("END")


class Counting(StreamTask):
    """Episodes of 5 or 6 tokens that count from 0, so that one sees where each begins."""

    def __init__(self, *, length: int, reset: bool) -> None:
        self.seed, self.batch_size, self.train_length, self.reset = 0, 3, length, reset

    def episode(self, rng: np.random.Generator) -> Episode:
        tokens = np.arange(rng.integers(5, 7))
        return Episode(tokens, tokens)


def rows(task: StreamTask, batches: int = SEGMENTS) -> ConsecutiveBatch:
    """Batches one after the other; ``fresh`` has a column for each."""
    found = [task.consecutive_batch(index) for index in range(batches)]
    fresh = torch.stack([batch.fresh for batch in found], dim=1)
    parts = (torch.cat([batch[part] for batch in found], dim=1) for part in (0, 1))
    return ConsecutiveBatch(*parts, fresh)


def same(one: ConsecutiveBatch, other: ConsecutiveBatch) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def begins(tokens: Tensor) -> Tensor:
    """Where a count begins, rather than going on from the token before."""
    before = torch.nn.functional.pad(tokens, (1, 0), value=-2)[:, :-1]
    return tokens != before + 1


@pytest.mark.parametrize("length", [4, 5, 6, 16])
def test_a_row_goes_on_over_batches_without_a_gap(length: int) -> None:
    tokens, targets, fresh = rows(Counting(length=length, reset=False))
    assert tokens.equal(targets)
    assert (tokens[begins(tokens)] == 0).all()
    assert fresh[:, 0].all()
    assert not fresh[:, 1:].any()


@pytest.mark.parametrize("length", [4, 5, 6, 16])
def test_with_reset_an_episode_begins_where_a_fresh_segment_does(length: int) -> None:
    tokens, targets, fresh = rows(Counting(length=length, reset=True))
    places = torch.arange(tokens.shape[1])
    starts = fresh.repeat_interleave(length, dim=1) & (places % length == 0)
    assert ((targets == 0) == starts).all()
    scored = targets != IGNORE
    assert tokens[scored].equal(targets[scored])


def test_with_reset_every_token_of_an_episode_is_a_target_once() -> None:
    _, targets, fresh = rows(Counting(length=4, reset=True), SEGMENTS - 2)
    episodes = targets[0].reshape(-1, 4)[: int(fresh[0].nonzero()[-1])]
    counts = episodes[episodes != IGNORE].tolist()
    assert all(now in (0, before + 1) for before, now in pairwise(counts))
    assert set(counts) == set(range(6))


def test_an_epoch_begins_every_row_anew_with_other_episodes() -> None:
    task = RandomWalk(length=16, batch_size=3)
    first, second = (task.consecutive_batch(index) for index in (0, SEGMENTS))
    assert second.fresh.all()
    assert not first.tokens.equal(second.tokens)


@pytest.mark.parametrize("settings", [{}, {"reset": True}])
@pytest.mark.parametrize("kind", [Algorithm, RandomWalk])
def test_consecutive_batches_do_not_depend_on_the_order_of_calls(
    kind: type[Any], settings: dict[str, bool]
) -> None:
    task, again = (kind(length=16, batch_size=2, **settings) for _ in range(2))
    indices = [0, 1, 70, 2, 130]
    forward = {index: task.consecutive_batch(index) for index in indices}
    backward = {index: again.consecutive_batch(index) for index in reversed(indices)}
    assert all(same(forward[index], backward[index]) for index in indices)


def test_a_row_of_programs_is_labelled_as_a_whole() -> None:
    task = Algorithm(statements=10, length=32, batch_size=3)
    tokens, targets, _ = rows(task, 20)
    for row, expected in zip(tokens.tolist(), targets.numpy(), strict=True):
        words = [task.words[token] for token in row]
        whole = len(words) - words[::-1].index(";")
        assert (task.targets(words[:whole]) == expected[:whole]).all()


@pytest.mark.parametrize("index", [None, 0])
def test_a_row_by_itself_holds_one_episode_with_reset_and_more_without(index: int | None) -> None:
    for reset, most in ((True, 1), (False, 1000)):
        task = Algorithm(statements=5, length=128, reset=reset)
        tokens, targets = task.train_batch(0) if index is None else task.labelled(128, index)
        ends = (tokens == END).sum(dim=1)
        assert 1 <= ends.min() <= ends.max() <= most
        if reset:
            after = (tokens == END).cumsum(dim=1) > 0
            assert (targets[after] == IGNORE).all()


@pytest.mark.parametrize("consecutive", [False, True])
def test_training_can_draw_from_so_many_episodes(consecutive: bool) -> None:
    task = RandomWalk(length=9, reset_every=8, batch_size=64, reset=True, episodes=5)
    batches = [task.consecutive_batch(n) if consecutive else task.train_batch(n) for n in range(3)]
    walks = {tuple(row) for batch in batches for row in batch.tokens.tolist()}
    assert len(walks) == 5
    assert len({tuple(row) for row in task.labelled(9, 0).tokens.tolist()} - walks) > 50


@pytest.mark.parametrize("kind", [Algorithm, RandomWalk])
def test_there_is_an_episode_to_draw(kind: type[Algorithm | RandomWalk]) -> None:
    with pytest.raises(InputError, match="wants episodes to be int of at least 1 or none, got 0"):
        kind(episodes=0)
