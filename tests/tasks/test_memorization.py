from stateline.tasks import IGNORE, Memorization


def test_a_key_has_the_same_value_in_all_rows_and_with_all_seeds() -> None:
    table: dict[int, int] = {}
    for seed in (0, 1):
        task = Memorization(seed, n_keys=9, length=31)
        for batch in (task.train_batch(0), task.labelled(31, 0)):
            assert (batch.tokens[:, 1::2] == 9).all()
            assert (batch.targets[:, ::2] == IGNORE).all()
            keys, values = batch.tokens[:, :-1:2].flatten(), batch.targets[:, 1::2].flatten()
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                assert table.setdefault(key, value) == value
    assert sorted(table) == list(range(9))
    assert sorted(table.values()) == list(range(10, 19))
