"""What every task on a text of tokens does, on texts whose tokens are all different."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.tasks import IGNORE, ConsecutiveBatch
from stateline.tasks.text.corpus import TextTask


class Numbered(TextTask):
    """Tokens 1, 2, ... in documents of given sizes, both to train on and to score."""

    title = about = ""

    def __init__(self, *sizes: int, length: int = 4, rows: int = 3, seed: int = 0) -> None:
        self.seed, self.train_length, self.batch_size = seed, length, rows
        tokens = np.arange(1, sum(sizes) + 1).astype(np.uint16)
        borders = np.cumsum([0, *sizes])
        self._training = self._held_out = TokenText([len(tokens)], lambda _: tokens, borders)


documents = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda x: sum(x) > 60)


def row_texts(batches: list[ConsecutiveBatch]) -> list[list[list[int]]]:
    """For each row the texts that it reads, each from a fresh place on, with its last target."""
    rows: list[list[list[int]]] = [[] for _ in batches[0].tokens]
    for tokens, targets, fresh in batches:
        for row, read in enumerate(rows):
            scored = targets[row] != IGNORE
            assert tokens[row][scored][1:].equal(targets[row][scored][:-1])
            if fresh[row]:
                read.append(tokens[row][:1].tolist())
            assert read[-1][-1] == tokens[row, 0]
            read[-1] += targets[row][scored].tolist()
    return rows


def epoch(task: Numbered, number: int = 0) -> list[ConsecutiveBatch]:
    count = task._batches_per_epoch
    return [task.consecutive_batch(number * count + index) for index in range(count)]


@given(size=st.integers(60, 200), seed=st.integers(0, 5))
def test_a_row_of_consecutive_batches_is_a_piece_of_the_text(size: int, seed: int) -> None:
    for (text,) in row_texts(epoch(Numbered(size, seed=seed), number=seed)):
        assert text == list(range(text[0], text[0] + len(text)))


@given(sizes=documents, seed=st.integers(0, 5))
def test_rows_begin_anew_at_each_document_and_never_cross_its_end(
    sizes: list[int], seed: int
) -> None:
    task = Numbered(*sizes, rows=2, seed=seed)
    begins = {int(border) + 1 for border in task._training.borders[:-1]}
    ends = set(task._training.borders[1:].tolist())
    for texts in row_texts(epoch(task)):
        assert all(text == list(range(text[0], text[-1] + 1)) for text in texts)
        if len(sizes) > 1:
            assert {text[0] for text in texts[1:]} <= begins
            assert {text[-1] for text in texts[:-1]} <= ends


def test_all_rows_together_read_the_text_once() -> None:
    task = Numbered(4 * 24 + 1, 1, 4 * 3 + 1, 0, rows=3)
    targets = torch.cat([batch.targets.flatten() for batch in epoch(task)])
    begins = {98, 99}
    assert sorted(targets[targets != IGNORE].tolist()) == sorted({*range(2, 112)} - begins)


@pytest.mark.parametrize("sizes", [(100,), (9, 50, 30, 22)])
def test_consecutive_batches_do_not_depend_on_what_was_read_before(sizes: tuple[int, ...]) -> None:
    once, other = Numbered(*sizes), Numbered(*sizes)
    for index in (17, 0, 5, 40, 1):
        for _ in range(index % 3):
            other.consecutive_batch(index * 7)
        assert all(map(torch.equal, once.consecutive_batch(index), other.consecutive_batch(index)))


@pytest.mark.parametrize("sizes", [(100,), (9, 50, 30, 22)])
def test_every_epoch_is_another_and_begins_with_fresh_rows(sizes: tuple[int, ...]) -> None:
    task = Numbered(*sizes)
    firsts = [epoch(task, number)[0] for number in range(6)]
    assert all(batch.fresh.all() for batch in firsts)
    assert len({batch.tokens.numpy().tobytes() for batch in firsts}) > 2


def test_rows_of_one_document_go_on_within_an_epoch() -> None:
    assert not any(batch.fresh.any() for batch in epoch(Numbered(100))[1:])


def test_every_token_is_a_target_in_some_epoch() -> None:
    task = Numbered(41, rows=3)
    read = torch.cat([batch.targets for number in range(60) for batch in epoch(task, number)])
    assert set(read.flatten().tolist()) - {IGNORE} == set(range(2, 42))


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 1, 1)])
def test_a_text_that_is_too_short_for_the_rows_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="a segment of length=4 for each of batch_size=3 rows"):
        Numbered(*sizes).consecutive_batch(0)


@given(sizes=documents, index=st.integers(0, 9))
def test_random_windows_stay_in_their_document(sizes: list[int], index: int) -> None:
    task = Numbered(*sizes)
    border_of = np.repeat(np.arange(len(sizes)), sizes)
    for tokens, targets in zip(*task.train_batch(index), strict=True):
        scored = targets != IGNORE
        window = [*tokens[scored].tolist(), *targets[scored].tolist()[-1:]]
        assert len(window) > 1
        assert all(b == a + 1 for a, b in pairwise(window))
        assert len({border_of[token - 1] for token in window}) == 1


def test_random_windows_are_drawn_in_proportion_to_the_documents() -> None:
    task = Numbered(5, 91, 5, rows=1000)
    first = task.train_batch(0).tokens[:, 0]
    assert 20 < (first == 1).sum() < 60
    assert set(range(6, 93)) <= set(first.tolist())


@given(sizes=documents, length=st.integers(1, 40))
def test_every_held_out_token_but_the_first_of_a_document_is_a_target_once(
    sizes: list[int], length: int
) -> None:
    task = Numbered(*sizes)
    targets = torch.cat([batch.targets.flatten() for batch in task.held_out(length)])
    begins = {int(border) + 1 for border in task._held_out.borders[:-1]}
    assert targets[targets != IGNORE].tolist() == sorted({*range(2, sum(sizes) + 1)} - begins)


@given(sizes=documents, length=st.integers(1, 40), rows=st.integers(1, 9))
def test_held_out_rows_read_the_text_once_and_go_on_from_batch_to_batch(
    sizes: list[int], length: int, rows: int
) -> None:
    task = Numbered(*sizes, rows=rows)
    batches = list(task.held_out_rows(length))
    scored = torch.cat([batch.targets.flatten() for batch in batches])
    begins = {int(border) + 1 for border in task._held_out.borders[:-1]}
    wanted = sorted({*range(2, sum(sizes) + 1)} - begins)
    assert sorted(scored[scored != IGNORE].tolist()) == wanted
    assert batches[0].fresh.all()
    for before, after in pairwise(batches):
        goes_on = ~after.fresh & (after.targets != IGNORE).any(dim=1)
        assert (after.tokens[goes_on, 0] == before.targets[goes_on, -1]).all()


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8), cut=st.integers(0, 45))
def test_a_text_in_parts_reads_as_one(sizes: list[int], cut: int) -> None:
    total = sum(sizes)
    tokens = np.arange(total)
    parts = np.split(tokens.astype(np.uint32), np.cumsum(sizes)[:-1])
    text = TokenText(sizes, parts.__getitem__, np.array([0, total // 2, total]))
    for start in range(total + 1):
        assert text.read(start, total).tolist() == tokens[start:].tolist()
    assert len(text.cut(cut)) == min(cut, total)
