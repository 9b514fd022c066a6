"""The choice of the next token, row by row: no row's choice depends on the other rows."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stateline.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Only so many of the most likely tokens are considered.
        top_p: Only the most likely tokens are considered that together reach this probability.
        repetition_penalty: For tokens that the prompt or the output has, positive logits are
            divided by it and negative ones multiplied, before all else; 1 changes nothing.

    References:
        Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, with the rule for negative
        logits that has become usual.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InputError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(
                f"repetition_penalty must be positive and finite, got {self.repetition_penalty}"
            )


GREEDY = Sampling()


def choose(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    random: Float[Tensor, " batch"] | None = None,
    seen: Bool[Tensor, "batch vocab"] | None = None,
) -> Int[Tensor, " batch"]:
    """Choose one token per row: where the cumulative distribution reaches the row's number.

    Args:
        logits: Of the next token.
        sampling: How to choose.
        random: A number above 0 and at most 1 for each row, as of :func:`uniform`; greedy choice
            needs none.
        seen: Which tokens the repetition penalty is for; by default none.

    Returns:
        The tokens.

    Example:
        >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY)
        tensor([1])
    """
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalized, logits)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    assert random is not None
    logits = logits.double() - logits.amax(dim=-1, keepdim=True)  # so that no quotient overflows
    logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = _restrict(logits, sampling)
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    reached = random[:, None].to(cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached)[:, 0]


def uniform(random: Int[Tensor, "batch 3"]) -> Float[Tensor, " batch"]:
    """A number above 0 and at most 1 for each row, fixed by its seed, row number and count.

    Counting in place of remembering (the generator is Philox) makes the state of a row's random
    numbers three integers, and the numbers of one row independent of those of another.

    Example:
        >>> uniform(torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0]]))
        tensor([0.9885, 0.4976, 0.9885], dtype=torch.float64)
    """
    numbers = [
        1 - np.random.Generator(np.random.Philox(key=[seed, row], counter=count)).random()
        for seed, row, count in random.tolist()
    ]
    return torch.tensor(numbers, dtype=torch.float64, device=random.device)


def _restrict(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling
) -> Float[Tensor, "batch vocab"]:
    """Exclude all but the likeliest tokens; the very likeliest always stays."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = float("-inf")
    if sampling.top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        before[:, 0] = 0  # where rounding says otherwise
        ordered = ordered.masked_fill(before >= sampling.top_p, float("-inf"))
    return torch.empty_like(logits).scatter(1, tokens, ordered)
