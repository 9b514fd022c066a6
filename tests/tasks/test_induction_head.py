from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import InductionHead


def follows_grammar(
    example: list[int], vocab_size: int, induction_length: int = 1, n_triggers: int = 1
) -> bool:
    """Whether the answer stands after every mark; written from the rules, not from our code."""
    mark = vocab_size - 1
    answer = example[-induction_length:]
    body, last = example[: -induction_length - 1], example[-induction_length - 1]
    marks = [place for place, token in enumerate(body) if token == mark]
    return (
        last == mark
        and all(1 <= token <= mark for token in example)
        and mark not in answer
        and 1 <= len(marks) <= n_triggers
        and all(body[place + 1 : place + 1 + induction_length] == answer for place in marks)
    )


def _sizes(case: Any) -> dict[str, int]:
    return {
        "vocab_size": case.args["vocab_size"],
        "induction_length": case.args.get("induction_len", 1),
        "n_triggers": case.args.get("induction_num_triggers", 1),
    }


@pytest.fixture(scope="module")
def official(official_synthetics: list[Any]) -> list[Any]:
    cases = [case for case in official_synthetics if case.args["copy_method"] == "induction_head"]
    return cases or pytest.skip("no official samples of the induction head")


def test_official_examples_follow_the_grammar(official: list[Any]) -> None:
    for case in official:
        assert all(follows_grammar(example, **_sizes(case)) for example in case.examples)


@given(
    vocab_size=st.integers(4, 30),
    induction_length=st.integers(1, 4),
    n_triggers=st.integers(1, 5),
    length=st.integers(6, 50),
    seed=st.integers(0, 2**40),
)
def test_our_examples_follow_the_grammar(
    vocab_size: int, induction_length: int, n_triggers: int, length: int, seed: int
) -> None:
    sizes = {
        "vocab_size": vocab_size,
        "induction_length": induction_length,
        "n_triggers": n_triggers,
    }
    task = InductionHead(seed, length=length, batch_size=8, **sizes)
    tokens, targets = task.train_batch(0)
    prompts, answers = task.problems(length, 0)
    assert answers.shape[1] == induction_length
    for examples in (torch.cat([tokens, targets[:, -1:]], 1), torch.cat([prompts, answers], 1)):
        assert all(follows_grammar(row, **sizes) for row in examples.tolist())


def test_the_grammar_notices_a_wrong_answer_and_a_second_mark() -> None:
    assert follows_grammar([1, 9, 3, 2, 9, 3], vocab_size=10)
    assert not follows_grammar([1, 9, 3, 2, 9, 2], vocab_size=10)
    assert not follows_grammar([9, 3, 9, 3, 9, 3], vocab_size=10)


def test_batches_have_the_shape_of_official_ones(official: list[Any]) -> None:
    for case in official:
        task = InductionHead(length=case.args["input_seq_len"], **_sizes(case))
        prompts, answers = task.problems(case.args["input_seq_len"], 0)
        assert task.train_batch(0).tokens.shape[1] == case.train_x.shape[1]
        assert prompts.shape[1] + answers.shape[1] - 1 == case.train_x.shape[1]


def test_evaluation_asks_for_the_tokens_that_it_officially_asks_for(
    official: list[Any],
) -> None:
    for case in official:
        asked = _sizes(case)["induction_length"]
        assert (case.train_y >= 0).all()
        assert ((case.test_y >= 0).sum(1) == asked).all()
        assert (case.test_y[:, -asked:] >= 0).all()
        assert (case.test_x[:, -asked] == case.args["vocab_size"] - 1).all()


def test_marks_are_uniform_over_their_places() -> None:
    tokens = InductionHead(length=10, batch_size=8000).train_batch(0).tokens.numpy()
    rows, places = np.nonzero(tokens[:, :10] == 19)
    counts = np.bincount(places, minlength=10)
    assert len(rows) == 8000
    assert counts[8:].sum() == 0
    assert abs(counts[:8] - 1000).max() < 5 * np.sqrt(1000)


def test_half_of_the_examples_have_one_mark_however_many_are_allowed() -> None:
    task = InductionHead(length=500, n_triggers=4, batch_size=4000)
    marks = (task.train_batch(0).tokens[:, :500] == 19).sum(1)
    assert marks.max() == 4
    assert 0.47 < (marks == 1).float().mean() < 0.53


def test_a_single_mark_is_uniform_where_more_are_allowed() -> None:
    task = InductionHead(length=500, n_triggers=4, batch_size=4000)
    marked = (task.train_batch(0).tokens[:, :500] == 19).int()
    places = marked[marked.sum(1) == 1].argmax(1).float()
    assert 232 < places.mean() < 266  # 249 in the mean, with a standard error of 3


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"vocab_size": 3}, "wants vocab_size to be int of at least 4, got 3"),
        ({"length": 2}, "length must be at least 3, .*got length=2"),
        ({"length": 5, "induction_length": 4}, "length must be at least 6"),
        ({"induction_length": 0}, "wants induction_length to be int of at least 1, got 0"),
        ({"n_triggers": 0}, "wants n_triggers to be"),
        ({"batch_size": 0}, "wants batch_size to be"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        InductionHead(**keywords)
