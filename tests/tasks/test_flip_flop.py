import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateline.errors import InputError
from stateline.tasks import IGNORE, Batch, FlipFlop
from stateline.tasks.synthetic.flip_flop import PASS, READ, WRITE


def check(batch: Batch) -> None:
    """The rules, one token after the other."""
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert tokens[0] == WRITE
        assert tokens[(len(tokens) - 1) // 2 * 2] == READ
        memory = None
        for place in range(0, len(tokens), 2):
            instruction, following = tokens[place], [*tokens, None][place + 1]
            assert instruction in (WRITE, READ, PASS)
            assert following in (0, 1, None)
            if instruction == WRITE:
                memory = following
            assert targets[place] == (memory if instruction == READ else IGNORE)
            if instruction == READ and following is not None:
                assert following == memory
        assert set(targets[1::2]) <= {IGNORE}


@given(
    length=st.integers(3, 50),
    p_ignore=st.floats(0, 1),
    seed=st.integers(0, 2**40),
)
def test_rows_follow_the_rules(length: int, p_ignore: float, seed: int) -> None:
    task = FlipFlop(seed, length=length, p_ignore=p_ignore, batch_size=4)
    check(task.train_batch(0))
    check(task.labelled(length + 1, 0))


def test_instructions_are_as_frequent_as_said() -> None:
    task = FlipFlop(length=402, p_ignore=0.8, eval_p_ignore=0.98, batch_size=100)
    for batch, ignored in ((task.train_batch(0), 0.8), (task.labelled(402, 0), 0.98)):
        inner = batch.tokens[:, 2:-2:2].numpy()
        share = np.bincount(inner.ravel(), minlength=5)[[WRITE, READ, PASS]] / inner.size
        expected = np.array([(1 - ignored) / 2, (1 - ignored) / 2, ignored])
        assert abs(share - expected).max() < 5 * np.sqrt(0.25 / inner.size)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"length": 2}, "length must be at least 3, .*got length=2"),
        ({"batch_size": 0}, "wants batch_size to be"),
        ({"p_ignore": 1.5}, "wants p_ignore to be a finite number from 0 to 1, got 1.5"),
        ({"eval_p_ignore": -0.1}, "wants eval_p_ignore to be"),
    ],
)
def test_impossible_settings_are_refused(keywords: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FlipFlop(**keywords)


def test_a_row_without_a_read_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="got length=2"):
        FlipFlop().labelled(2, 0)
