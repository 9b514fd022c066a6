import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, SelectiveCopying


@given(n_data=st.integers(1, 9), noise=st.integers(0, 30), seed=st.integers(0, 2**40))
def test_targets_are_the_data_tokens_in_their_order(n_data: int, noise: int, seed: int) -> None:
    length = 2 * n_data + noise
    task = SelectiveCopying(seed, n_data=n_data, length=length, batch_size=4, vocab_size=9)
    for batch, before in (
        (task.train_batch(0), length - n_data),
        (task.labelled(4 * length, 0), 4 * length - n_data),
    ):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            data = [token for token in tokens[:before] if token]
            assert len(data) == n_data
            assert all(1 <= token <= 7 for token in data)
            assert tokens[before:] == [8] * n_data
            assert targets == [IGNORE] * before + data


def test_places_and_data_are_uniform() -> None:
    task = SelectiveCopying(n_data=4, length=16, vocab_size=6, batch_size=3000)
    tokens = task.train_batch(0).tokens[:, :12]
    at_each_place = (tokens > 0).sum(0).numpy()
    assert abs(at_each_place - 1000).max() < 5 * np.sqrt(1000)
    counts = np.bincount(tokens[tokens > 0].numpy(), minlength=5)[1:]
    assert abs(counts - 3000).max() < 5 * np.sqrt(3000)


def test_guessing_is_right_once_in_as_many_answers_as_there_are_data_tokens() -> None:
    task = SelectiveCopying(vocab_size=6)
    assert task.chance(batches=40) == pytest.approx(1 / 4, abs=0.02)
    assert task.eval_lengths == (64, 128, 256)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 15}, "length must be at least 2 \\* n_data, .*got length=15 and n_data=8"),
        ({"n_data": 0}, "wants n_data to be"),
        ({"vocab_size": 2}, "wants vocab_size to be"),
        ({"batch_size": 0}, "wants batch_size to be"),
    ],
)
def test_impossible_settings_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SelectiveCopying(**keywords)


def test_a_row_that_is_too_short_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="got length=15"):
        SelectiveCopying().labelled(15, 0)
