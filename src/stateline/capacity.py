"""How much a state can hold: its bits, the bounds they imply, and the bits a model needs."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate import Session, prefill
from stateline.generate.session_state import check_model
from stateline.layers.base import AnyLayer, require_causal
from stateline.layers.state import State
from stateline.models.language_model import LanguageModel

BITS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Bits per state entry at which a model is scored."""

TOLERANCE = 0.05
"""Largest drop of a score at which the bits still suffice."""

COUNTERS = ("length", "phase", "position", "room")
"""State fields that depend on the number of tokens alone, so that they hold no information."""

MAX_LENGTH = (1 << 31) - 1
"""Upper limit on the length to measure at, so that a typo gives an error message."""

_LONGEST = 1 << 40
"""Longest length to try: a state that suffices here is taken to hold strings of any length."""


def state_bits(layer: AnyLayer, tokens: int) -> int:
    """Information-bearing bits of one sequence's state after a number of tokens.

    Counters of tokens (``COUNTERS``) are left out: they are equal for all strings of one length.

    Example:
        >>> from stateline.layers import Attention
        >>> state_bits(Attention(8), tokens=10)  # keys and values: 10 * 2 * 8 floats
        5120
    """
    require_causal(layer, "the bound on copying")
    leaves, _ = pytree.tree_flatten_with_path(layer.init_state(1))
    counters = sum(
        leaf.numel() * leaf.element_size()
        for path, leaf in leaves
        if getattr(path[-1], "name", "") in COUNTERS and not leaf.is_floating_point()
    )
    return 8 * (layer.state_bytes(tokens) - counters)


def copy_error_bound(bits: int | float, length: int, n_letters: int = 26) -> float:
    r"""Lower bound on the share of random strings that a state of this size fails to copy.

    .. math:: \mathrm{error} \ge 1 - |S| / D^L

    A model answers from its state after the string. So there are at most as many different answers
    as states, and each answer is right for one string.

    Args:
        bits: Base-2 logarithm of the number of states.
        length: L, letters per string.
        n_letters: D, size of the alphabet; all letters are equally likely.

    Example:
        >>> copy_error_bound(bits=4, length=5, n_letters=2)
        0.5

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, theorem 2.7.
    """
    missing = length * math.log2(n_letters) - bits
    return -math.expm1(-missing * math.log(2)) if missing > 0 else 0.0


def recalled_bits(score: float, length: int, n_letters: int = 26) -> float:
    r"""Fewest bits of a state from which this share of random strings is copied.

    .. math:: L \log_2 D + \log_2 \mathrm{score}

    The inverse of :func:`copy_error_bound`; 0 if it is negative, as if nothing is copied.

    Args:
        score: Share of strings that are copied, 0 to 1.
        length: L, letters per string.
        n_letters: D, size of the alphabet; all letters are equally likely.

    Example:
        >>> recalled_bits(0.5, length=5, n_letters=2)
        4.0
    """
    if not 0 <= score <= 1:
        raise InputError(f"score must be a share from 0 to 1, got {score}")
    return max(0.0, length * math.log2(n_letters) + math.log2(score)) if score else 0.0


def copy_error(model: LanguageModel, length: int, n_letters: int = 26) -> float:
    """Lower bound on the share of random strings of ``length`` letters that a model fails to copy.

    :func:`copy_error_bound` for the state after BOS, the string and SEP; 1 if the model's learned
    positions end before the copy does.
    """
    # The model reads all tokens but the last letter of the copy.
    if model.max_len is not None and 2 * length + 1 > model.max_len:
        return 1.0
    return copy_error_bound(state_bits(model, length + 2), length, n_letters)


def longest_copy(model: LanguageModel, n_letters: int = 26) -> int | None:
    """Largest number of letters for which the bound does not exclude that every string is copied.

    ``None`` if there is no limit, as for a state that grows by at least the bits of a letter per
    token.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> longest_copy(LanguageModel(ModelConfig("lstm", vocab_size=30, d_model=8)))
        108
        >>> longest_copy(LanguageModel(ModelConfig("attention", vocab_size=30, d_model=8)))
    """
    lengths = range(1, _LONGEST)
    fitting = bisect_left(lengths, True, key=lambda n: copy_error(model, n, n_letters) > 0)
    return None if fitting == len(lengths) else fitting


@dataclass(frozen=True)
class ScoreByBits:
    """How a score depends on the precision of the state.

    Attributes:
        numbers: Entries of the state of one sequence.
        whole: Score with the exact state.
        by_bits: Score by bits per entry.
    """

    numbers: int
    whole: float
    by_bits: dict[int, float]

    @property
    def needed(self) -> int | None:
        """Fewest bits per entry that keep the score, as all more do, within ``TOLERANCE``."""
        enough = None
        for bits in sorted(self.by_bits, reverse=True):
            if self.by_bits[bits] < self.whole - TOLERANCE:
                break
            enough = bits
        return enough


def answered_by_decoding(task: Any) -> bool:
    """True if a task has prompts that a model answers token by token."""
    return callable(getattr(task, "problems", None))


@torch.inference_mode()
def measure(
    model: LanguageModel,
    task: Any,
    length: int,
    *,
    bits: tuple[int, ...] = BITS,
    batches: int = 4,
    noise: bool = False,
) -> ScoreByBits:
    """Score a model whose state is rounded before it reads the last token of each prompt.

    In copying, the last token is SEP, so that the whole copy is a function of ``bits * numbers``
    bits. Every entry of the state is rounded to one of ``2**bits`` values, evenly spaced over the
    range that the entry has on other prompts of the same length. With ``noise``, uniform noise of
    the same width is added instead, so that a model cannot gain from how its values are spaced.

    Args:
        model: In evaluation mode.
        task: A task that is answered by decoding: it has ``problems`` and ``score``. Its ``metric``
            is the score.
        length: In the task's own unit.
        bits: Bits per entry.
        batches: Number of batches; as many further batches give the ranges.
        noise: Add noise instead of rounding.

    Raises:
        InputError: If the task is not answered by decoding, ``batches`` is not positive, or the
            length is too large.
    """
    check_model(model)
    if not answered_by_decoding(task):
        raise InputError(
            "capacity is measured on tasks that are answered by decoding, such as copying, got "
            f"{task.title!r}"
        )
    if batches < 1:
        raise InputError(f"batches must be at least 1, got {batches}")
    if length > MAX_LENGTH:
        raise InputError(f"length must be at most {MAX_LENGTH:,}, got {length}")
    device = model.device
    problems = _batches_of_one_length(task, length, 2 * batches)
    states = [prefill(model, prompts.to(device)) for prompts, _ in problems]
    low, high = _ranges([state.model for state in states[batches:]])
    perturb: Callable[..., State] = blur_state if noise else round_state

    def score(precision: int | None) -> float:
        total = 0.0
        for (_, answers), state in zip(problems, states[:batches], strict=False):
            if precision is not None:
                state = state._replace(model=perturb(state.model, low, high, precision))
            count = answers.shape[1]
            session = Session(model, state, room=count)
            found = torch.stack([session.step().tokens for _ in range(count)], dim=1)
            total += task.score(answers, found.cpu())[task.metric] / batches
        return total

    leaves = pytree.tree_leaves(states[0].model)
    numbers = sum(leaf[0].numel() for leaf in leaves if leaf.is_floating_point())
    return ScoreByBits(numbers, score(None), {b: score(b) for b in bits})


def _batches_of_one_length(task: Any, length: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of prompts of one length, since the size of a cache depends on the length."""
    drawn = (task.problems(length, index) for index in itertools.count())
    first = next(drawn)
    same = (batch for batch in drawn if batch[0].shape == first[0].shape)
    return [first, *itertools.islice(same, count - 1)]


def round_state(state: State, low: State, high: State, bits: int) -> State:
    """Round each entry to the middle of one of ``2**bits`` equal parts of its range.

    Integers, such as positions, are kept.

    Example:
        >>> round_state(torch.tensor([0.0, 0.2, 0.9, 3.0]), torch.zeros(4), torch.ones(4), bits=1)
        tensor([0.2500, 0.2500, 0.7500, 0.7500])
    """

    def rounded(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
        size = (most - least) / 2**bits
        part = ((x - least) / size).nan_to_num().floor().clamp(0, 2**bits - 1)
        return least + (part + 0.5) * size

    return _map_numbers(rounded, state, low, high)


def blur_state(state: State, low: State, high: State, bits: int) -> State:
    r"""Add uniform noise to each entry, as wide as ``2**-bits`` of its range.

    At most :math:`\log_2(2^b + 1)` bits per entry remain: the result spans at most :math:`2^b + 1`
    widths of the noise. The noise is the same at every call; integers are kept.

    Example:
        >>> x = torch.tensor([0.0, 0.2, 0.9, 3.0])
        >>> blurred = blur_state(x, torch.zeros(4), torch.ones(4), bits=1)
        >>> (blurred - x.clamp(0, 1)).abs().max() <= 0.25
        tensor(True)
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def blurred(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
        return x.clamp(least, most) + (drawn - 0.5) * (most - least) / 2**bits

    return _map_numbers(blurred, state, low, high)


def _map_numbers(change: Callable[..., Tensor], state: State, *others: State) -> State:
    """Change the floating-point tensors of a state."""
    return pytree.tree_map(
        lambda x, *more: change(x, *more) if x.is_floating_point() else x, state, *others
    )


def _ranges(states: list[State]) -> tuple[State, State]:
    """Smallest and largest value of each entry over the rows of all states."""

    def over_rows(reduce: str, *leaves: Tensor) -> Tensor:
        return getattr(torch.cat(leaves), reduce)(dim=0, keepdim=True)

    return (
        pytree.tree_map(partial(over_rows, "amin"), *states),
        pytree.tree_map(partial(over_rows, "amax"), *states),
    )
