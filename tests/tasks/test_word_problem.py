"""What the word problem promises beyond the contract."""

from itertools import permutations

import pytest
import torch

from stateline.errors import InputError
from stateline.tasks import WordProblem

ORDERS = {"s3": 6, "s5": 120, "a5": 60, "z2": 2, "z7": 7, "z256": 256}


def labels(task: WordProblem, factors: list[int]) -> list[tuple[int, ...]]:
    """The products of factors that are given by their ids."""
    products = task._products(torch.tensor([factors]).numpy())[0]
    return [task.elements[product] for product in products]


@pytest.mark.parametrize(("group", "order"), ORDERS.items())
def test_a_group_has_all_its_elements(group: str, order: int) -> None:
    assert len(WordProblem(group=group).elements) == order


def test_s5_is_all_arrangements_and_a5_the_even_ones() -> None:
    s5 = WordProblem(group="s5").elements
    assert s5 == list(permutations(range(5)))
    even = [p for p in s5 if sum(p[i] > p[j] for j in range(5) for i in range(j)) % 2 == 0]
    assert WordProblem(group="a5").elements == even


def test_swap_rotate_and_rest_do_as_they_say() -> None:
    rotated, swapped, rested = (1, 2, 0), (2, 1, 0), (2, 1, 0)
    assert labels(WordProblem(), [1, 0, 2]) == [rotated, swapped, rested]


def test_the_order_of_factors_matters() -> None:
    task = WordProblem()
    assert labels(task, [0, 1])[-1] != labels(task, [1, 0])[-1]


def test_z2_is_parity() -> None:
    tokens, targets = WordProblem(group="z2").train_batch(0)
    odd = (tokens == 0).cumsum(1) % 2
    assert (targets - 2).equal(odd)


def test_a_cyclic_group_counts() -> None:
    tokens, targets = WordProblem(group="z7").train_batch(0)
    assert (targets - 2).equal((tokens == 0).cumsum(1) % 7)


def test_with_all_elements_as_factors_the_first_label_is_the_first_factor() -> None:
    task = WordProblem(group="a5", inputs="elements")
    tokens, targets = task.train_batch(0)
    assert task.n_inputs == 60
    assert tokens[:, 0].equal(targets[:, 0] - 60)
    assert len(tokens.unique()) == 60


def test_products_of_elements_associate() -> None:
    task = WordProblem(group="s5", inputs="elements")
    a, b, c = 17, 94, 51
    ab, bc = (task.elements.index(labels(task, pair)[-1]) for pair in ([a, b], [b, c]))
    assert labels(task, [ab, c])[-1] == labels(task, [a, bc])[-1]


@pytest.mark.parametrize("group", ["s4", "z1", "z0", "z257", "z", "z-3", "S3", ""])
def test_an_unknown_group_is_refused(group: str) -> None:
    with pytest.raises(InputError, match=r"group must be s3, s5, a5 or z<n>, n from 2 to 256, got"):
        WordProblem(group=group)


@pytest.mark.parametrize("sizes", [{"length": 0}, {"batch_size": 0}])
def test_sizes_are_positive(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="to be int of at least 1, got 0"):
        WordProblem(**sizes)  # type: ignore[arg-type]
