from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import AssociativeRecall, ExampleTask, InductionHead, generator
from stateline.tasks.synthetic.associative_recall import DOT


def follows_grammar(example: list[int], vocab_size: int, key_length: int = 1) -> bool:
    """Whether the answer follows from the pairs; written from the rules, not from our code."""
    n_key_tokens = (vocab_size - 2) // 2
    pairs, (prefix, *query, answer) = example[: -key_length - 2], example[-key_length - 2 :]
    table: dict[tuple[int, ...], int] = {}
    for start in range(0, len(pairs), key_length + 1):
        *key, value = pairs[start : start + key_length + 1]
        if not all(1 <= token <= n_key_tokens for token in key):
            return False
        if not n_key_tokens < value < vocab_size - 1:
            return False
        if table.setdefault(tuple(key), value) != value:
            return False
    whole = len(pairs) % (key_length + 1) == 0
    return whole and prefix == vocab_size - 1 and table.get(tuple(query)) == answer


@pytest.fixture(scope="module")
def official(official_synthetics: list[Any]) -> list[Any]:
    cases = [
        case
        for case in official_synthetics
        if case.args["copy_method"] == "assoc_recall" and not case.args.get("allow_dot")
    ]
    return cases or pytest.skip("no official samples of associative recall")


def test_official_examples_follow_the_grammar(official: list[Any]) -> None:
    for case in official:
        sizes = case.args["vocab_size"], case.args.get("num_keys", 1)
        assert all(follows_grammar(example, *sizes) for example in case.examples)


@given(
    half=st.integers(2, 12),
    key_length=st.integers(1, 3),
    length=st.integers(4, 60),
    seed=st.integers(0, 2**40),
)
def test_our_examples_follow_the_grammar(
    half: int, key_length: int, length: int, seed: int
) -> None:
    task = AssociativeRecall(
        seed, vocab_size=2 * half, key_length=key_length, length=length, batch_size=4
    )
    tokens, targets = task.train_batch(0)
    prompts, answers = task.problems(length, 0)
    for examples in (torch.cat([tokens, targets[:, -1:]], 1), torch.cat([prompts, answers], 1)):
        assert all(follows_grammar(row, 2 * half, key_length) for row in examples.tolist())


def test_the_grammar_notices_a_wrong_answer() -> None:
    assert follows_grammar([1, 5, 2, 6, 9, 1, 5], vocab_size=10)
    assert not follows_grammar([1, 5, 2, 6, 9, 1, 6], vocab_size=10)


def test_batches_have_the_shape_of_official_ones(official: list[Any]) -> None:
    for case in official:
        task = AssociativeRecall(
            vocab_size=case.args["vocab_size"],
            length=case.args["input_seq_len"],
            key_length=case.args.get("num_keys", 1),
        )
        test_length = case.args.get("test_seq_len") or case.args["input_seq_len"]
        assert task.train_batch(0).tokens.shape[1] == case.train_x.shape[1]
        assert task.problems(test_length, 0).prompts.shape[1] == case.test_x.shape[1]


def test_training_has_a_target_everywhere_and_evaluation_one_as_officially(
    official: list[Any],
) -> None:
    task = AssociativeRecall()
    assert (task.train_batch(0).targets > 0).all()
    assert task.problems(20, 0).answers.shape[1] == 1
    for case in official:
        assert (case.train_y >= 0).all()
        assert ((case.test_y >= 0).sum(1) == 1).all()


def _many(length: int, count: int = 8000) -> np.ndarray:
    return AssociativeRecall(length=length, batch_size=count).train_batch(0).tokens.numpy()


def test_keys_and_values_are_uniform() -> None:
    tokens = _many(length=2)  # one pair: later keys are independent, later values are not
    counts = np.bincount(tokens[:, :2].ravel(), minlength=10)
    assert counts[[0, 9]].sum() == 0
    assert abs(counts[1:9] - 2000).max() < 5 * np.sqrt(2000)


def test_the_query_is_uniform_over_the_keys_present_however_often_each_occurs() -> None:
    counts: Counter[int] = Counter()
    for first, _, second, _, third, _, _, query in _many(length=6).tolist():
        occurrences = Counter([first, second, third])
        if len(occurrences) == 2:  # one key twice, one once
            counts[occurrences[query]] += 1
    total = sum(counts.values())
    assert abs(counts[1] - total / 2) < 5 * np.sqrt(total / 4)


def test_the_commonest_value_is_right_half_of_the_time() -> None:
    prompts, answers = AssociativeRecall().problems(20, 0)
    values = torch.nn.functional.one_hot(prompts[:, 1:20:2], 10).sum(1)
    accuracy = (values.argmax(1) == answers[:, 0]).float().mean()
    assert 0.4 < accuracy < 0.6


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"vocab_size": 2}, "vocab_size must be even and at least 4, .*got vocab_size=2"),
        ({"vocab_size": 11}, "vocab_size must be even"),
        ({"length": 1}, "length must hold at least one pair of 2 tokens, got length=1"),
        ({"length": 3, "key_length": 3}, "one pair of 4 tokens"),
        ({"key_length": 0}, "wants key_length to be"),
        ({"batch_size": 0}, "wants batch_size to be int of at least 1, got 0"),
        ({"vocab_size": 1000, "key_length": 2}, "65536 keys at most"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AssociativeRecall(**keywords)


def test_a_length_without_a_pair_is_refused_at_evaluation_too() -> None:
    with pytest.raises(InputError, match="got length=0"):
        AssociativeRecall().problems(0, 0)


@pytest.mark.parametrize("kind", [AssociativeRecall, InductionHead])
def test_a_fixed_number_of_examples_is_gone_through_in_every_epoch(
    kind: type[ExampleTask],
) -> None:
    task = kind(examples=50, batch_size=16)
    epochs = [[task.train_batch(3 * epoch + n).tokens for n in range(3)] for epoch in (0, 1)]
    first, second = ([tuple(row.tolist()) for batch in epoch for row in batch] for epoch in epochs)
    assert len(set(first)) == len(set(second)) == 48  # two are left over
    assert len(set(first) | set(second)) <= 50
    assert first != second
    assert torch.equal(kind(examples=50, batch_size=16).train_batch(4).tokens, epochs[1][1])


def test_the_smaller_last_batch_of_an_epoch_is_kept() -> None:
    """50 examples are three batches of 16 and one of 2; each epoch has every example once."""
    task = AssociativeRecall(examples=50, batch_size=16, drop_last=False)
    for epoch in range(2):
        batches = [task.train_batch(4 * epoch + i).tokens for i in range(4)]
        assert [len(batch) for batch in batches] == [16, 16, 16, 2]
        assert sorted(torch.cat(batches).tolist()) == sorted(task._fixed[:, :-1].tolist())


def test_examples_must_make_a_batch() -> None:
    with pytest.raises(InputError, match="examples must be at least batch_size=16"):
        AssociativeRecall(examples=15, batch_size=16)


def test_absent_keys_are_asked_for_if_allowed_and_answered_by_the_dot() -> None:
    task = AssociativeRecall(length=6, batch_size=400, allow_dot=True)
    rows = torch.cat([task.draw(generator(0, "test"), 400, 6)]).tolist()
    absent = [row for row in rows if row[-2] not in row[0:6:2]]
    assert {row[-1] for row in absent} == {DOT}
    assert all(row[-1] == row[2 * row[0:6:2].index(row[-2]) + 1] for row in rows if row[-1] != DOT)
    expected = (3 / 4) ** 3  # that none of three draws is the key, of four, that is asked for
    assert len(absent) / 400 == pytest.approx(
        expected, abs=4 * (expected * (1 - expected) / 400) ** 0.5
    )


def test_by_default_only_keys_that_are_present_are_asked_for() -> None:
    rows = AssociativeRecall(length=6).draw(generator(0, "test"), 400, 6).tolist()
    assert all(row[-2] in row[0:6:2] and row[-1] != DOT for row in rows)


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({}, 0.48, 0.56),  # E(most frequent of 4 values of 4 keys) / 4 = 0.53
        ({"length": 2}, 1.0, 1.0),  # a single pair
        ({"key_length": 2, "length": 60}, 0.3, 0.45),
        ({"vocab_size": 60, "allow_dot": True, "length": 6}, 0.87, 0.93),  # mostly "."
    ],
)
def test_a_guess_is_the_most_common_value_of_the_prompt(
    settings: dict[str, Any], low: float, high: float
) -> None:
    assert low <= AssociativeRecall(**settings).chance() <= high
