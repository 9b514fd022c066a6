from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, NgramLookup, make_task


def places(string: list[int], key: list[int]) -> list[int]:
    """Where a key stands in a string."""
    return [at for at in range(len(string)) if string[at : at + len(key)] == key]


def parsed(task: NgramLookup, rows: torch.Tensor) -> Iterator[tuple[list[int], list[int], int]]:
    """String, key and answer of packed rows up to the last whole example, by the grammar alone."""
    for row in rows.tolist():
        examples = " ".join(map(str, row)).split(f" {task.eos} ")[:-1]
        for example in examples:
            parts = example.removeprefix(f"{task.bos} ").split(f" {task.sep} ")
            first, *others = ([int(token) for token in part.split()] for part in parts)
            if task.key == "suffix":
                (last,) = others
                yield first, last[: task.n], last[task.n :]
            else:
                string, answer = others
                yield string, first, answer


tasks = st.builds(
    NgramLookup,
    seed=st.integers(0, 2**40),
    n=st.integers(1, 4),
    key=st.sampled_from(["suffix", "prefix"]),
    answer_len=st.sampled_from([None, 1, 3]),
    n_letters=st.sampled_from([6, 26]),
    min_len=st.integers(7, 9),
    max_len=st.integers(9, 14),
    context_len=st.integers(40, 100),
)


@given(task=tasks)
def test_a_key_occurs_once_and_the_answer_follows_it(task: NgramLookup) -> None:
    found = list(parsed(task, task.train_batch(0).tokens))
    assert found
    for string, key, answer in found:
        (at,) = places(string, key)
        following = string[at + task.n :]
        assert answer == following[: task.answer_len]
        assert len(key) == task.n
        assert len(answer) == (task.answer_len or len(following))
        assert task.min_len <= len(string) <= task.max_len
        assert answer


@given(task=tasks)
def test_the_loss_looks_at_the_answers_of_whole_examples_and_at_eos(task: NgramLookup) -> None:
    tokens, targets = task.train_batch(0)
    for row, expected in zip(tokens.tolist(), targets.tolist(), strict=True):
        full = [*row, expected[-1] if expected[-1] != IGNORE else task.pad]
        mask: list[int] = []
        for number, token in enumerate(full):
            mask.append(IGNORE)
            if token == task.eos:
                begin = number - 1
                while full[begin] < task.n_letters:
                    begin -= 1
                begin += 1 + (task.n if task.key == "suffix" else 0)
                mask[begin:] = full[begin : number + 1]
        assert mask[1:] == expected


@given(task=tasks, length=st.integers(10, 18))
def test_problems_are_examples_without_their_answers(task: NgramLookup, length: int) -> None:
    prompts, answers = task.problems(length, 0)
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        assert task.eos not in answer
        whole = [*prompt, *(token for token in answer if token != IGNORE), task.eos, task.bos]
        ((string, key, said),) = parsed(task, torch.tensor([whole]))
        (at,) = places(string, key)
        assert said == string[at + task.n :][: task.answer_len]
        assert len(string) == length


def test_keys_are_uniform_over_their_places() -> None:
    task = NgramLookup(n=5, answer_len=3, min_len=12, max_len=12)  # 5 letters hardly ever repeat
    starts = [
        places(string, key)[0]
        for index in range(100)
        for string, key, _ in parsed(task, task.train_batch(index).tokens)
    ]
    counts = np.bincount(starts)
    assert len(counts) == 5  # 0 to 12 - 5 - 3: the last place, too
    assert abs(counts - len(starts) / 5).max() < 5 * np.sqrt(len(starts) / 5)


def test_a_short_answer_is_scored_by_its_own_letters() -> None:
    answers = torch.tensor([[1, 2, 3, 4], [1, 2, IGNORE, IGNORE]])
    predictions = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4]])
    assert NgramLookup().score(answers, predictions) == {
        "string_accuracy": 0.5,
        "character_accuracy": 0.75,
    }


def test_long_keys_are_told_apart_whatever_their_number() -> None:
    task = NgramLookup(n=20, min_len=30, max_len=30, context_len=80)
    assert all(
        len(places(string, key)) == 1 for string, key, _ in parsed(task, task.train_batch(0).tokens)
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"n": 0}, "n and answer_len must be at least 1, .*got n=0"),
        ({"answer_len": 0}, "got n=2, answer_len=0"),
        ({"answer_len": -1}, "got n=2, answer_len=-1"),
        ({"min_len": 4}, "a string must hold both: got n=2, answer_len=3 and a length of 4"),
        ({"context_len": 22}, "the longest example, 23 tokens, got context_len=22"),
        ({"key": "prefix", "context_len": 23}, "the longest example, 24 tokens"),
        ({"longest": 10}, "longest must be at least the training length, got longest=10"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NgramLookup(**keywords)


def test_an_unknown_place_of_the_key_is_refused() -> None:
    with pytest.raises(InputError, match="wants key to be one of suffix, prefix, got 'middle'"):
        make_task("ngram_lookup(key=middle)")


def test_a_length_at_which_no_key_is_unique_is_refused() -> None:
    task = NgramLookup(n=1, n_letters=2)
    with pytest.raises(InputError, match="a string must hold n letters that occur once"):
        task.problems(100, 0)
