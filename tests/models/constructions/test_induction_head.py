"""Appendix D.2 of H3: two layers of attention find what followed the same token before."""

import itertools

import pytest
import torch

from stateline import check_layer
from stateline.errors import InputError
from stateline.evaluate import evaluate
from stateline.models.constructions import induction_head
from stateline.tasks import AssociativeRecall, InductionHead


@torch.inference_mode()
def test_the_answer_followed_the_same_token_before_in_every_short_string() -> None:
    strings = torch.tensor(list(itertools.product(range(3), repeat=7)))
    answers = induction_head(3, longest=7)(strings).argmax(dim=-1)
    for string, answered in zip(strings.tolist(), answers.tolist(), strict=True):
        for now, answer in enumerate(answered):
            followers = [b for a, b in itertools.pairwise(string[: now + 1]) if a == string[now]]
            others = [token for token in followers if token != string[now]] or followers
            commonest = max(map(others.count, others), default=0)
            assert not others or others.count(answer) == commonest, (string, now, answer)


@pytest.mark.parametrize("length", [30, 200])
def test_it_solves_the_induction_task(length: int) -> None:
    assert evaluate(induction_head(20), InductionHead(), length)["accuracy"] == 1.0


def test_it_solves_associative_recall() -> None:
    assert evaluate(induction_head(10), AssociativeRecall(), 100)["accuracy"] == 1.0


def test_it_streams() -> None:
    report = check_layer(induction_head(5, longest=10))
    assert report.ok, report


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"must be at least 1, got vocab_size=0"):
        induction_head(0)
