import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, MultiQueryRecall


@given(length=st.integers(4, 60), seed=st.integers(0, 2**40))
def test_every_key_is_asked_for_once_and_its_value_is_the_target(length: int, seed: int) -> None:
    task = MultiQueryRecall(seed, n_keys=20, n_values=5, length=length, batch_size=4)
    n_pairs = length // 4
    for batch in (task.train_batch(0), task.labelled(length, 0)):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            table = dict(zip(tokens[: 2 * n_pairs : 2], tokens[1 : 2 * n_pairs : 2], strict=True))
            assert len(table) == n_pairs
            assert all(1 <= key <= 20 < value <= 25 for key, value in table.items())
            asked = tokens[2 * n_pairs :]
            assert sorted(token for token in asked if token) == sorted(table)
            expected = [table.get(token, IGNORE) for token in asked]
            assert targets == [IGNORE] * 2 * n_pairs + expected


def test_values_are_uniform_and_independent_of_their_key() -> None:
    tokens = (
        MultiQueryRecall(n_keys=8, n_values=4, length=32, batch_size=2000).train_batch(0).tokens
    )
    keys, values = tokens[:, :16:2].flatten().numpy(), tokens[:, 1:16:2].flatten().numpy()
    counts = np.bincount(keys * 4 + values - 9, minlength=36)[4:]
    assert abs(counts - 500).max() < 5 * np.sqrt(500)


def test_it_is_scored_as_far_as_keys_reach() -> None:
    assert MultiQueryRecall(n_keys=16, length=32).eval_lengths == (32, 64)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 3}, "length must be at least 4, .*got length=3"),
        ({"n_keys": 7}, "a quarter of it at most n_keys, .*got length=32 and n_keys=7"),
        ({"n_values": 0}, "wants n_values to be"),
        ({"batch_size": 0}, "wants batch_size to be"),
    ],
)
def test_impossible_sizes_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MultiQueryRecall(**keywords)
