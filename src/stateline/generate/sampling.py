"""The choice of the next token; no row's choice depends on the other rows."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.random import uniform, widest
from stateline.settings import Count, NotNegative, Range, Settings, at_least, within

DRAWN = 32
"""Random numbers per row that are computed at a time."""


PartOfAll = Annotated[float, Range("above 0, at most 1", lambda share: 0 < share <= 1)]
Penalty = Annotated[float, within(1e-9, 1e9)]
"""Beyond, logits overflow."""


@dataclass(frozen=True)
class Sampling(Settings):
    """How the next token is chosen from the logits.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Only this many of the most likely tokens are considered.
        top_p: Only the most likely tokens whose probabilities sum up to this are considered.
        repetition_penalty: Positive logits of tokens that occur in the prompt or the output are
            divided by it, negative ones multiplied, before any other step; 1 changes nothing.
        min_p: Only tokens are considered whose probability, at this temperature, is at least this
            share of the largest one.

    Raises:
        InputError: If a value is out of range, or no number.

    References:
        Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, with the rule for negative
        logits that has become usual. Min-p: Nguyen et al., "Turning Up the Heat", 2024.
    """

    temperature: NotNegative = 0.0
    top_k: Count | None = None
    top_p: PartOfAll | None = None
    repetition_penalty: Penalty = 1.0
    min_p: PartOfAll | None = None


GREEDY = Sampling()

LARGEST = 100.0
"""Largest penalty; logits that differ by so much are never chosen."""


@dataclass
class Penalties:
    """What is added to the logits of one text, before the repetition penalty and the temperature.

    Attributes:
        presence: Subtracted for tokens that were chosen already.
        frequency: Subtracted for each time that a token was chosen.
        bias: Added to single tokens.
        ends: Tokens that are not chosen among the first ``least``.
        least: See there.
        counts: How often each token was chosen.

    Raises:
        InputError: If a value is out of range.

    Example:
        >>> penalties = Penalties(frequency=0.5, bias={2: 1.0}, counts=Counter([0, 0]))
        >>> penalties(torch.zeros(4))
        tensor([-1.,  0.,  1.,  0.])
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    ends: Collection[int] = ()
    least: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name, value in (("presence", self.presence), ("frequency", self.frequency)):
            if not abs(value) <= LARGEST:
                raise InputError(f"{name}_penalty must be from -100 to 100, got {value}")
        at_least(0, min_tokens=self.least)

    @property
    def change_nothing(self) -> bool:
        """Whether nothing is ever added."""
        return not (self.presence or self.frequency or self.bias or (self.ends and self.least))

    def __call__(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """The logits with everything added, at least in float32."""
        added = defaultdict[int, float](float, self.bias)
        if self.presence or self.frequency:
            for token, count in self.counts.items():
                added[token] -= self.presence + self.frequency * count
        if self.counts.total() < self.least:
            added.update(dict.fromkeys(self.ends, -math.inf))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        places = torch.tensor(list(added), dtype=torch.int64, device=logits.device)
        return logits.index_add(0, places, logits.new_tensor(list(added.values())))


def penalize(
    penalties: Sequence[Penalties], logits: Float[Tensor, "batch vocab"]
) -> Float[Tensor, "batch vocab"]:
    """The logits with what the penalties of each row add."""
    places = [place for place, one in enumerate(penalties) if not one.change_nothing]
    if not places:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for place in places:
        logits[place] = penalties[place](logits[place])
    return logits


def choose(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    random: Float[Tensor, " batch"] | None = None,
    seen: Bool[Tensor, "batch vocab"] | None = None,
) -> Int[Tensor, " batch"]:
    """In each row, choose the first token whose cumulative probability reaches ``random``.

    It runs on the device of the logits, without a synchronisation.

    Args:
        logits: Logits of the next token.
        sampling: How to choose.
        random: A number in (0, 1] for each row, as from :func:`uniform`; not needed if greedy.
        seen: Tokens that the repetition penalty applies to; by default none.

    Returns:
        The tokens; where logits are NaN, some token of the vocabulary.

    Example:
        >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY)
        tensor([1])
    """
    if sampling.temperature == 0:
        return _penalized(logits, sampling, seen).argmax(dim=-1)
    assert random is not None
    return pick(probabilities(logits, sampling, seen), random)


def probabilities(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    seen: Bool[Tensor, "batch vocab"] | None = None,
) -> Float[Tensor, "batch vocab"]:
    """The distribution that :func:`choose` draws the next token from; if greedy, a single token.

    Example:
        >>> probabilities(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY)
        tensor([[0., 1., 0.]])
    """
    logits = _penalized(logits, sampling, seen)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(1, logits.argmax(dim=-1, keepdim=True), 1)
    logits = logits.to(widest(logits.device))
    logits = logits - logits.amax(dim=-1, keepdim=True)  # avoids overflow in the division
    logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits = _restrict(logits, sampling)
    if sampling.min_p is not None:  # the largest logit is 0
        logits = logits.masked_fill(logits < math.log(sampling.min_p), float("-inf"))
    return logits.softmax(dim=-1)


def pick(
    chances: Float[Tensor, "batch vocab"], random: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """The first token of each row whose cumulative chance reaches ``random`` times their sum."""
    cumulative = chances.cumsum(dim=-1)
    reached = random[:, None].to(cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, reached)[:, 0].clamp(max=chances.shape[-1] - 1)


def _penalized(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    seen: Bool[Tensor, "batch vocab"] | None,
) -> Float[Tensor, "batch vocab"]:
    """The logits after the repetition penalty."""
    penalty = sampling.repetition_penalty
    if seen is None or penalty == 1:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def _restrict(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling
) -> Float[Tensor, "batch vocab"]:
    """Set the logits of all but the likeliest tokens to -inf; the likeliest always stays."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, min(sampling.top_k, ordered.shape[1]) :] = float("-inf")
    if sampling.top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= sampling.top_p, float("-inf"))
    return torch.empty_like(logits).scatter(1, tokens, ordered)


class Sampler:
    """Chooses the next tokens of some rows, each by the sampling of the row.

    Args:
        samplings: The sampling of each row.
        device: Where logits are.
    """

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        rows = defaultdict(list)
        for row, sampling in enumerate(samplings):
            rows[sampling].append(row)
        self._groups = [(s, torch.tensor(found, device=device)) for s, found in rows.items()]
        drawn = [[0, 0, int(sampling.temperature > 0)] for sampling in samplings]
        self._advance = torch.tensor(drawn, device=device)
        self._draws = any(sampling.temperature > 0 for sampling in rows)
        self._numbers: Tensor | None = None
        self._next = 0

    def draw(self, random: Int[Tensor, "batch 3"]) -> tuple[Tensor | None, Int[Tensor, "batch 3"]]:
        """The random numbers of the next tokens, and the rows' counters after them."""
        if not self._draws:
            return None, random
        if self._numbers is None or self._next == DRAWN:
            self._numbers, self._next = uniform(random, DRAWN), 0
        self._next += 1
        return self._numbers[:, self._next - 1], random + self._advance

    def choose(
        self,
        logits: Float[Tensor, "batch vocab"],
        numbers: Tensor | None,
        seen: Bool[Tensor, "batch vocab"],
    ) -> Int[Tensor, " batch"]:
        """The next token of each row."""
        if len(self._groups) == 1:
            return choose(logits, self._groups[0][0], numbers, seen)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for sampling, rows in self._groups:
            own = None if numbers is None else numbers[rows]
            tokens[rows] = choose(logits[rows], sampling, own, seen[rows])
        return tokens
