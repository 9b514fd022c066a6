from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, Copying

Cases = dict[str, dict[str, Any]]


def answer_mask(row: list[int], n_letters: int, length_answer: int = 0) -> list[int]:
    """Which tokens of a packed row are answers; fails where the row breaks the grammar.

    Written from the rules, not from our code. Official answers may be the first
    ``length_answer`` letters only.
    """
    bos, sep, eos = range(n_letters, n_letters + 3)
    mask: list[int] = []
    while len(mask) < len(row):
        rest = row[len(mask) :]
        letters = rest[1 : rest.index(sep)] if sep in rest else rest[1:]
        assert all(letter < n_letters for letter in letters)
        answer = [*letters[: length_answer or None], eos]
        example = [bos, *letters, sep, *answer]
        assert rest[: len(example)] == example[: len(rest)]
        whole = len(example) <= len(rest)
        mask += ([0] * (len(letters) + 2) + [int(whole)] * len(answer))[: len(rest)]
    return mask


def of_kind(cases: Cases, prefix: str) -> list[dict[str, Any]]:
    """Official cases of one kind, such as ``train/copy/``."""
    found = [case for name, case in cases.items() if name.startswith(prefix)]
    return found or pytest.skip(f"no official samples of {prefix}")


def test_official_rows_follow_the_grammar_and_carry_its_mask(official_strings: Cases) -> None:
    for case in of_kind(official_strings, "train/copy/"):
        for row, mask in zip(case["input_ids"], case["mask"], strict=True):
            assert answer_mask(row, case["vocab_size"], case["length_answer"]) == mask


@given(
    n_letters=st.integers(1, 26),
    min_len=st.integers(1, 8),
    more=st.integers(0, 8),
    room=st.integers(0, 60),
    answer_len=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 2**40),
)
def test_our_rows_follow_the_grammar_and_carry_its_mask(
    n_letters: int, min_len: int, more: int, room: int, answer_len: int | None, seed: int
) -> None:
    context_len = 2 * (min_len + more) + 3 + room
    task = Copying(
        seed,
        n_letters=n_letters,
        min_len=min_len,
        max_len=min_len + more,
        context_len=context_len,
        answer_len=answer_len,
    )
    tokens, targets = task.train_batch(0)
    assert tokens.shape == (16, context_len - 1)
    for row, expected in zip(tokens.tolist(), targets.tolist(), strict=True):
        mask = [int(target != IGNORE) for target in expected]
        # The last token of the packed row is a target only; where it is ignored, it is unknown.
        if mask[-1]:
            assert answer_mask([*row, expected[-1]], n_letters, answer_len or 0)[1:] == mask
        else:
            assert answer_mask(row, n_letters, answer_len or 0)[1:] == mask[:-1]


def test_the_grammar_notices_a_wrong_copy() -> None:
    assert answer_mask([2, 0, 1, 3, 0, 1, 4], n_letters=2) == [0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(AssertionError):
        answer_mask([2, 0, 1, 3, 1, 1, 4], n_letters=2)


def test_an_example_that_is_cut_has_no_targets() -> None:
    task = Copying(min_len=3, max_len=3, context_len=17)  # 9 tokens, then 8 of the next 9
    assert (task.train_batch(0).targets[:, 8:] == IGNORE).all()


def test_an_example_that_ends_with_the_row_has_its_targets() -> None:
    targets = Copying(min_len=3, max_len=3, context_len=18).train_batch(0).targets
    assert (targets[:, -4:] != IGNORE).all()
    assert (targets[:, -1] == 28).all()


def test_lengths_are_uniform() -> None:
    tokens = Copying(min_len=3, max_len=10, batch_size=8000).train_batch(0).tokens
    first_lengths = (tokens == 27).int().argmax(dim=1) - 1
    counts = first_lengths.bincount(minlength=11).numpy()
    assert counts.sum() == counts[3:].sum() == 8000
    assert abs(counts[3:] - 1000).max() < 5 * np.sqrt(1000)


def test_letters_are_uniform() -> None:
    letters = Copying().problems(length=400, index=0).answers
    counts = letters.flatten().bincount(minlength=26).numpy()
    expected = letters.numel() / 26
    assert abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_official_evaluation_strings_are_prompt_and_answer_as_ours(
    official_strings: Cases,
) -> None:
    for case in of_kind(official_strings, "eval/copy/"):
        if case["length_answer"] > 0:
            continue
        task = Copying(n_letters=case["vocab_size"])
        ours = torch.cat(tuple(task.problems(case["length"], 0)), dim=1).tolist()
        theirs = [row[: len(ours[0])] for row in case["input_ids"]]
        following = {row[len(ours[0])] for row in case["input_ids"]}
        assert following == {task.eos}
        for row in ours + theirs:
            letters = row[-case["length"] :]
            assert row == [task.bos, *letters, task.sep, *letters]


def test_scores_equal_official_ones_on_official_predictions(official_strings: Cases) -> None:
    for case in of_kind(official_strings, "eval/"):
        predictions, expected = case["pred_ids"], case["scores_str_char"]
        for row, mask, predicted, (string, character) in zip(
            case["input_ids"], case["mask"], predictions, expected, strict=True
        ):
            places = [place for place, answered in enumerate(mask) if answered][:-1]  # without EOS
            answer = torch.tensor([[row[place] for place in places]])
            prediction = torch.tensor([[predicted[place - 1] for place in places]])
            scores = Copying().score(answer, prediction)
            assert scores == pytest.approx(
                {"string_accuracy": string, "character_accuracy": character}
            )


def test_a_part_of_the_string_can_be_asked_for() -> None:
    prompts, answers = Copying(answer_len=4).problems(9, 0)
    assert answers.equal(prompts[:, 1:5])


def test_it_can_be_scored_far_beyond_training() -> None:
    assert Copying(longest=1000).eval_lengths == (10, 20, 40, 80, 160, 320, 640, 1000)


def test_one_wrong_letter_costs_the_string_and_one_letter() -> None:
    answers = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    predictions = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4]])
    assert Copying().score(answers, predictions) == {
        "string_accuracy": 0.5,
        "character_accuracy": 0.875,
    }


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"n_letters": 0}, "wants n_letters to be int from 1 to 26, got 0"),
        ({"n_letters": 27}, "wants n_letters to be int from 1 to 26, got 27"),
        ({"min_len": 0}, "wants min_len to be"),
        ({"min_len": 11}, "at most max_len, got min_len=11 and max_len=10"),
        ({"context_len": 22}, "the longest example, 23 tokens, got context_len=22"),
        ({"batch_size": 0}, "wants batch_size to be"),
        ({"answer_len": 0}, "wants answer_len to be int of at least 1 or none, got 0"),
        ({"longest": 9}, "longest must be at least the training length, got longest=9"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Copying(**keywords)


def test_an_empty_string_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="got length=0"):
        Copying().problems(0, 0)


def test_mixed_scores_spread_over_the_lengths_of_training() -> None:
    task = Copying(min_len=3, max_len=10, mixed=True)
    lengths = [task.problems(10, index).answers.shape[1] for index in range(16)]
    assert sorted(set(lengths)) == list(range(3, 11))
    assert max(map(lengths.count, lengths)) <= 3
    assert task.problems(20, 0).answers.shape[1] == 20
    assert task.train_batch(0).tokens.equal(Copying(min_len=3, max_len=10).train_batch(0).tokens)


def test_characters_can_be_the_metric() -> None:
    task = Copying(metric="character_accuracy")
    answers = task.problems(4, 0).answers
    guessed = answers.clone()
    guessed[:, 0] += 1
    assert task.score(answers, guessed)[task.metric] == 0.75
