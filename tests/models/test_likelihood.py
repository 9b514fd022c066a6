import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.evaluate.losses import losses_of
from stateline.generate.session import Choice
from stateline.models.likelihood import IGNORE, log_probabilities, token_losses
from stateline.tasks.base import cross_entropy
from stateline.train.chunked_loss import chunked

VOCABULARIES = [49_152, 151_936, 262_144]
ROWS = 16


def chosen(table: Tensor, targets: Tensor) -> Tensor:
    return -table.gather(-1, targets[..., None])[..., 0]


PATHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token_losses": token_losses,
    "log_probabilities": lambda x, y: chosen(log_probabilities(x), y),
    "decoding": lambda x, y: -Choice(y[0], x[0]).log_probs,
    "texts, in chunks": lambda x, y: losses_of(y, x.shape[-1])(lambda h: h, x),
    "training": lambda x, y: cross_entropy(x, y) / y.numel(),
    "training, in chunks": lambda x, y: chunked(cross_entropy, 4, y)(lambda h: h, x) / y.numel(),
}
"""Everything that scores or trains, as a function of logits and targets."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("path", PATHS)
def test_losses_have_no_bias_with_large_vocabularies(
    path: str, vocabulary: int, dtype: torch.dtype
) -> None:
    """Logits as spread as those of trained models, whose bias was 5e-4 on a strided axis."""
    drawn = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(1, ROWS, vocabulary, generator=drawn)).to(dtype)
    targets = torch.randint(vocabulary, (1, ROWS), generator=drawn)
    exact = F.cross_entropy(logits[0].double(), targets[0])
    assert abs(PATHS[path](logits, targets).double().mean() - exact) < 2e-6


def test_gradients_and_ignored_targets_are_those_of_cross_entropy() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (2, 5)).where(torch.rand(2, 5) < 0.7, IGNORE)
    losses = token_losses(logits, targets)
    wanted = F.cross_entropy(logits.mT, targets, reduction="none", ignore_index=IGNORE)
    assert torch.allclose(losses, wanted)
    weights = torch.rand(2, 5, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad((losses * weights).sum(), logits),
        torch.autograd.grad((wanted * weights).sum(), logits),
        strict=True,
    ):
        assert torch.allclose(found, expected)


def test_losses_can_be_differentiated_twice() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([2, IGNORE, 0])
    assert torch.autograd.gradcheck(lambda x: token_losses(x, targets), logits)
    assert torch.autograd.gradgradcheck(lambda x: token_losses(x, targets), logits)


def test_gradients_of_half_precision_have_its_type_and_losses_do_not() -> None:
    logits = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = cross_entropy(logits[None], torch.tensor([[0, 1, IGNORE]]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    assert not logits.grad[2].any()


def test_excluded_tokens_have_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert log_probabilities(logits).exp().tolist() == [[0.5, 0.5, 0.0]]
    assert token_losses(logits, torch.tensor([2])).tolist() == [math.inf]
