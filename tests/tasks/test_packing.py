"""Packed rows of text: every document once, nearly no padding, and the loss of each alone."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.data import CorpusSettings, write_corpus
from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.factory import make_model
from stateline.models.presets import configure
from stateline.tasks import IGNORE, PackedBatch, Text, Tokens
from stateline.tasks.text.corpus import TextTask
from stateline.tasks.text.windows import best_fit
from stateline.train.batches import MicroBatch, positions_after
from stateline.train.config import TrainConfig
from stateline.train.loop import train


class Numbered(TextTask):
    """Tokens 1, 2, ... in documents of given sizes, both to train on and to score."""

    title = about = ""
    documents = "pack"

    def __init__(self, *sizes: int, length: int = 8, rows: int = 2, seed: int = 0) -> None:
        self.seed, self.train_length, self.batch_size = seed, length, rows
        tokens = np.arange(1, sum(sizes) + 1).astype(np.uint16)
        borders = np.cumsum([0, *sizes])
        self._training = self._held_out = TokenText([len(tokens)], lambda _: tokens, borders)


sizes_of_documents = st.lists(st.integers(0, 30), min_size=4, max_size=20).filter(
    lambda sizes: sum(size - 1 for size in sizes if size) > 40
)


def targets_of(batches: list[PackedBatch]) -> list[int]:
    """All targets, each the token after its input, none from another document than its input."""
    found = torch.cat([torch.stack(batch[:2]).flatten(1) for batch in batches], dim=1)
    tokens, targets = found[:, found[1] != IGNORE]
    assert targets.equal(tokens + 1)
    return targets.tolist()


def expected(sizes: tuple[int, ...] | list[int]) -> list[int]:
    """Every token but the first of each document."""
    borders = np.cumsum([0, *sizes])
    pairs = pairwise(borders)
    return [n for a, b in pairs for n in range(int(a) + 2, int(b) + 1)]


@given(lengths=st.lists(st.integers(1, 9), max_size=40))
def test_best_fit_fills_rows_and_no_row_overflows(lengths: list[int]) -> None:
    rows = best_fit(np.array(lengths, dtype=np.int64), 9)
    filled = np.bincount(rows, weights=lengths) if lengths else np.array([])
    assert (filled <= 9).all()
    assert len(filled) == len(set(rows.tolist()))
    half = filled[filled * 2 <= 9]
    assert len(half) <= 1  # two rows that are at most half full would be one


@given(sizes=sizes_of_documents, seed=st.integers(0, 3))
def test_an_epoch_of_packed_rows_reads_every_target_once(sizes: list[int], seed: int) -> None:
    task = Numbered(*sizes, rows=1, seed=seed)
    count = len(task._rows)
    batches = [task.train_batch(count * seed + index) for index in range(count)]
    assert sorted(targets_of(batches)) == expected(sizes)


@given(sizes=sizes_of_documents, length=st.integers(1, 20))
def test_all_held_out_targets_are_scored_once(sizes: list[int], length: int) -> None:
    task = Numbered(*sizes)
    assert sorted(targets_of(list(task.held_out(length)))) == expected(sizes)
    assert sorted(targets_of(list(task.held_out_rows(length)))) == expected(sizes)


@given(sizes=sizes_of_documents)
def test_documents_begin_where_starts_say(sizes: list[int]) -> None:
    task = Numbered(*sizes)
    first = {int(place) + 1 for place in np.cumsum([0, *sizes])}
    for index in range(3):
        tokens, targets, starts = task.train_batch(index)
        goes_on = tokens[:, 1:] == tokens[:, :-1] + 1
        scored = (targets != IGNORE)[:, 1:]
        assert starts[:, 0].all()
        assert (starts[:, 1:] | goes_on | ~scored).all()
        borders = torch.isin(tokens, torch.tensor(sorted(first))) & (targets != IGNORE)
        assert (starts | ~borders).all()


@given(sizes=sizes_of_documents, seed=st.integers(0, 3))
def test_rows_of_consecutive_batches_go_on_where_they_ended(sizes: list[int], seed: int) -> None:
    task = Numbered(*sizes, length=4, seed=seed)
    steps = task._batches_per_epoch
    batches = [task.consecutive_batch(seed * steps + step) for step in range(steps)]
    read = targets_of(batches)
    assert len(read) == len(set(read)) == steps * 8
    assert set(read) <= set(expected(sizes))
    for before, after in pairwise(batches):
        goes_on = before.targets[:, -1] == after.tokens[:, 0]
        assert (goes_on | after.starts[:, 0]).all()
        assert not (goes_on & after.starts[:, 0]).any()
    assert batches[0].starts[:, 0].all()


def test_batches_are_functions_of_their_number() -> None:
    sizes = random.Random(0).choices(range(2, 30), k=40)
    one, other = Numbered(*sizes), Numbered(*sizes)
    for index in (7, 0, 30):
        pairs = zip(one.train_batch(index), other.train_batch(index), strict=True)
        assert all(a.equal(b) for a, b in pairs)
    other.consecutive_batch(9)
    pairs = zip(one.consecutive_batch(3), other.consecutive_batch(3), strict=True)
    assert all(a.equal(b) for a, b in pairs)


def test_short_documents_leave_few_positions_unscored() -> None:
    drawn = random.Random(0)
    sizes = [max(2, int(drawn.gammavariate(1.2, 200))) for _ in range(2000)]
    task = Numbered(*sizes, length=2048)
    batches = [task.train_batch(index) for index in range(len(task._rows) // 2)]
    scored = torch.cat([batch.targets.flatten() for batch in batches]) != IGNORE
    assert scored.float().mean() > 0.98


def test_too_little_text_for_a_batch_of_packed_rows_is_refused() -> None:
    with pytest.raises(InputError, match="at least batch_size=2, got 1"):
        Numbered(3, 4).train_batch(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty short files."""
    drawn = random.Random(0)
    (tmp_path / "text").mkdir()
    for number in range(40):
        text = " ".join(drawn.choices(["red", "green", "blue"], k=drawn.randint(1, 25)))
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    return tmp_path / "text"


def packed_text(folder: Path, **changes: Any) -> Text:
    settings = {"length": 64, "batch_size": 4, "documents": "pack", **changes}
    return Text(path=str(folder), **settings)


def test_text_and_tokens_pack_the_same_documents(folder: Path, tmp_path: Path) -> None:
    write_corpus([folder], tmp_path / "corpus", CorpusSettings("byte", held_out=0.2), workers=1)
    corpus = Tokens(path=str(tmp_path / "corpus"), length=64, batch_size=4, documents="pack")
    for task in (corpus, packed_text(folder)):
        batch = task.train_batch(0)
        assert isinstance(batch, PackedBatch)
        assert int(batch.starts.sum()) > 4
        assert ((batch.targets == IGNORE).float().mean()) < 0.2


@pytest.mark.parametrize("carried", [False, True])
def test_packed_and_separate_documents_have_one_score(folder: Path, carried: bool) -> None:
    torch.manual_seed(0)
    model = make_model(configure("mamba attention(position=rope)", vocab_size=256, d_model=8))
    # with one row, the carried state has read the whole document before each window
    tasks = (
        packed_text(folder, carried=carried, batch_size=1, documents=documents)
        for documents in ("pack", "separate")
    )
    packed, separate = (evaluate(model, task, 64, batches=0)["bits_per_byte"] for task in tasks)
    assert packed == pytest.approx(separate, rel=1e-5)


SHORT = TrainConfig(steps=4, lr=1e-2, schedule="constant", warmup_steps=0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"segment_len": 16},
        {"carry_state": True, "carry_cap": 256},
        {"carry_state": True, "carry_cap": 96, "segment_len": 32},
        {"checkpoint_activations": True},
    ],
    ids=str,
)
def test_training_on_packed_rows_resumes_to_the_bit(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    config = replace(SHORT, **change)
    weights = []
    for stops in ((4,), (2, 4)):
        torch.manual_seed(0)
        model = make_model(configure("h3 attention", vocab_size=256, d_model=8))
        for steps in stops:
            own = replace(config, steps=steps)
            train(model, packed_text(folder), own, folder=tmp_path / str(len(stops)))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_the_gradient_of_packed_rows_is_that_of_separate_documents(folder: Path) -> None:
    torch.manual_seed(0)
    model = make_model(configure("gated_delta_net attention", vocab_size=256, d_model=8)).double()
    task = packed_text(folder)
    tokens, targets, starts = task.train_batch(0)
    task.loss(model(tokens, starts=starts), targets).backward()
    packed = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for row, begins in enumerate(starts):
        borders = [*begins.nonzero().flatten().tolist(), len(begins)]
        for a, b in pairwise(borders):
            own = slice(row, row + 1), slice(a, b)
            task.loss(model(tokens[own]), targets[own]).backward()
    separate = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(packed, separate, rtol=1e-9, atol=1e-12)


def test_the_length_of_what_is_carried_counts_from_the_last_start() -> None:
    starts = torch.zeros(3, 5, dtype=torch.bool)
    starts[1, 3] = starts[2, 0] = True
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    micro = MicroBatch(tokens, tokens, torch.tensor([False, False, True]), 5, starts)
    assert positions_after(torch.tensor([7, 7, 7]), micro).tolist() == [12, 2, 5]
