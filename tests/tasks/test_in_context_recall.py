import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, InContextRecall


def _expected(tokens: list[int], n_keys: int, n_values: int, key_length: int) -> list[int]:
    """Targets of a row, and the token after it, by reading from left to right."""
    table: dict[tuple[int, ...], tuple[int, ...]] = {}
    targets, place = [IGNORE] * len(tokens), 0
    while place < len(tokens):
        if tokens[place] >= n_keys + n_values:  # noise
            place += 1
            continue
        key = tuple(tokens[place : place + key_length])
        start = place = place + len(key)
        while place < len(tokens) and n_keys <= tokens[place] < n_keys + n_values:
            place += 1
        value = tuple(tokens[start:place])
        if key in table:
            assert value == table[key] or place == len(tokens)  # a cut value
            targets[start:place] = value
        elif value:
            table[key] = value
    return targets


@given(
    key_length=st.integers(1, 3),
    value_length=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.5]),
    length=st.integers(12, 60),
    seed=st.integers(0, 2**40),
)
def test_values_of_keys_that_were_seen_are_the_targets(
    key_length: int, value_length: int, noise: float, length: int, seed: int
) -> None:
    task = InContextRecall(
        seed,
        n_keys=3,
        n_values=4,
        n_noise=2,
        key_length=key_length,
        value_length=value_length,
        noise=noise,
        length=length,
    )
    tokens, targets = task.labelled(length, 0)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert len(row) == length
        assert max(row) < task.vocab_size
        # the last target stands for a token that is not in the row
        end = [wanted[-1]] if wanted[-1] != IGNORE else []
        assert _expected([*row, *end], 3, 4, key_length)[1 : length + 1] == (
            wanted if end else wanted[:-1]
        )
        assert any(target != IGNORE for target in wanted)


def test_training_rows_have_the_next_token_as_target_and_shorter_keys() -> None:
    task = InContextRecall(n_keys=7, key_length=3, value_length=3)
    tokens, targets = task.train_batch(0)
    assert targets[:, :-1].equal(tokens[:, 1:])
    lone = (tokens[:, 1:-1] < 7) & (tokens[:, :-2] >= 7) & (tokens[:, 2:] >= 7)
    assert lone.any()


def test_a_share_of_the_pairs_is_noise() -> None:
    tokens = InContextRecall(noise=0.2, length=400, batch_size=100).train_batch(0).tokens
    share = (tokens >= 16).float().mean().item()
    assert abs(share - 0.2) < 0.02
    assert InContextRecall(noise=0.2).vocab_size == 32
    assert InContextRecall().vocab_size == 16


def test_one_value_for_all_keys_is_a_guess() -> None:
    assert abs(InContextRecall().chance() - 1 / 8) < 0.01


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 3}, "length must be at least 4, for two pairs, got length=3"),
        ({"key_length": 2, "length": 5}, "length must be at least 6"),
        ({"noise": 1.0}, "wants noise to be a finite number from 0 to below 1, got 1.0"),
        ({"noise": float("nan")}, "wants noise to be"),
        ({"n_noise": 0}, "wants n_noise to be"),
        ({"n_keys": 1, "key_length": 20}, "wants n_keys to be int of at least 2, got 1"),
        ({"value_length": 0}, "wants value_length to be"),
        ({"n_keys": 64, "key_length": 3}, "65,536 keys at most, which n_keys=64"),
    ],
)
def test_impossible_settings_are_refused(keywords: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        InContextRecall(**keywords)  # type: ignore[arg-type]
