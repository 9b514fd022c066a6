"""Proposition 3: an H3 layer of width 8, state 2 and four heads solves associative recall."""

import itertools

import pytest
import torch
from torch import Tensor

from stateline import check_layer
from stateline.evaluate import evaluate
from stateline.layers import H3
from stateline.models.constructions import recall_h3
from stateline.tasks import AssociativeRecall

ARROW = 9


def examples(n_pairs: int, ending: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Every sequence of pairs that agree, each with every key that it holds; and the answers."""
    prompts, answers = [], []
    for keys in itertools.product(range(1, 5), repeat=n_pairs):
        present = sorted(set(keys))
        for values in itertools.product(range(5, 9), repeat=len(present)):
            table = dict(zip(present, values, strict=True))
            pairs = [token for key in keys for token in (key, table[key])]
            for query in present:
                prompts.append([*pairs, *ending, query])
                answers.append(table[query])
    return torch.tensor(prompts), torch.tensor(answers)


@pytest.mark.parametrize("n_pairs", [1, 2, 3, 4])
@pytest.mark.parametrize("ending", [(), (ARROW,)], ids=["paper", "task"])
@torch.inference_mode()
def test_every_example_of_the_language_is_solved(n_pairs: int, ending: tuple[int, ...]) -> None:
    prompts, answers = examples(n_pairs, ending)
    assert recall_h3()(prompts)[:, -1].argmax(dim=1).equal(answers)


@pytest.mark.parametrize("length", [20, 2000])
def test_long_examples_are_solved(length: int) -> None:
    assert evaluate(recall_h3(), AssociativeRecall(), length, batches=2)["accuracy"] == 1.0


def test_it_has_the_sizes_of_the_proposition() -> None:
    model = recall_h3()
    (layer,) = (module for module in model.modules() if isinstance(module, H3))
    assert (layer.d_model, layer.shift.c.shape[1], layer.d_model // layer.d_head) == (8, 2, 4)


def test_a_key_is_answered_wherever_it_stands() -> None:
    tokens = torch.tensor([[1, 6, 2, 8, 1, 6, 2, 8]])
    assert recall_h3()(tokens)[0, [4, 6]].argmax(dim=1).tolist() == [6, 8]


def test_it_streams() -> None:
    report = check_layer(recall_h3())
    # Gradients are not asked for: frequencies are zero, where they hardly matter.
    broken = [f.clause for f in report.findings if not f.ok and "gradient" not in f.clause]
    assert not broken, report
