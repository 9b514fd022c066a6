import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import Copying, DuplicateNgram


@given(n=st.integers(1, 5), length=st.integers(10, 30), seed=st.integers(0, 2**40))
def test_every_string_holds_n_letters_twice_without_overlap(n: int, length: int, seed: int) -> None:
    task = DuplicateNgram(seed, n=n)
    for string in task.problems(length, 0).answers.tolist():
        grams = [tuple(string[at : at + n]) for at in range(length - n + 1)]
        assert any(gram in grams[at + n :] for at, gram in enumerate(grams))


def test_the_shortest_possible_string_is_the_letters_twice() -> None:
    answers = DuplicateNgram(n=4).problems(8, 0).answers
    assert answers[:, :4].equal(answers[:, 4:])


def test_the_prompt_is_the_string_between_bos_and_sep() -> None:
    task = DuplicateNgram(n=3)
    prompts, answers = task.problems(12, 0)
    assert prompts[:, 1:-1].equal(answers)
    assert set(prompts[:, 0].tolist() + prompts[:, -1].tolist()) == {task.bos, task.sep}


def test_training_is_that_of_copying() -> None:
    ours, theirs = (
        DuplicateNgram(3, max_len=12).train_batch(5),
        Copying(3, max_len=12).train_batch(5),
    )
    assert ours.tokens.equal(theirs.tokens)
    assert ours.targets.equal(theirs.targets)


def test_places_are_uniform() -> None:
    task = DuplicateNgram(n=8, max_len=19, context_len=41)  # 10 pairs of places
    counts = np.zeros((20, 20))
    for index in range(100):
        for string in task.problems(19, index).answers.tolist():
            grams = [tuple(string[at : at + 8]) for at in range(12)]
            for first, gram in enumerate(grams):
                if gram in grams[first + 1 :]:
                    counts[first, grams.index(gram, first + 1)] += 1
    drawn = counts[counts > 0]
    assert len(drawn) == 10
    assert abs(drawn - 640).max() < 5 * np.sqrt(640)


@pytest.mark.parametrize("n", [0, 6])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(InputError, match=f"got n={n} and a length of 10"):
        DuplicateNgram(n=n)


def test_a_length_without_room_for_two_is_refused() -> None:
    with pytest.raises(InputError, match="a length of 9"):
        DuplicateNgram(n=5).problems(9, 0)


def test_answers_score_as_copies_do() -> None:
    answers = torch.tensor([[1, 2, 3, 4]])
    assert DuplicateNgram().score(answers, answers)["string_accuracy"] == 1.0
