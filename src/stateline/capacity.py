"""What a state can hold: its bits, what they bound, and how many of them a trained model needs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate import Session, SessionState, begin
from stateline.layers.base import AnyLayer
from stateline.layers.state import State
from stateline.models.language_model import LanguageModel
from stateline.tasks import GeneratedTask, Task

BITS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Bits per number of a state at which a model is scored."""

TOLERANCE = 0.05
"""By how much a score may fall before the bits count as too few."""

_LONGEST = 1 << 40
"""Who can hold so many letters holds any number of them."""


def state_bits(layer: AnyLayer, tokens: int) -> int:
    """Bits of one sequence's state after so many tokens."""
    return 8 * layer.state_bytes(tokens)


def copy_error_bound(bits: int | float, length: int, n_letters: int = 26) -> float:
    r"""Least share of random strings that a model with a state of so many bits cannot copy.

    .. math:: \mathrm{error} \ge 1 - |S| / D^L

    The answers are a function of the state after the string, so no more of them differ than
    states do, and each is right for one string.

    Args:
        bits: The logarithm of the number of states, to base 2.
        length: L, letters of a string.
        n_letters: D, equally likely letters.

    Example:
        >>> copy_error_bound(bits=4, length=5, n_letters=2)
        0.5

    References:
        Jelassi et al., "Repeat After Me", ICML 2024, theorem 2.7.
    """
    missing = length * math.log2(n_letters) - bits
    return -math.expm1(-missing * math.log(2)) if missing > 0 else 0.0


def copy_error(model: LanguageModel, length: int, n_letters: int = 26) -> float:
    """Least share of random strings of ``length`` letters that a model cannot copy.

    That of :func:`copy_error_bound` for its state after SEP; all, where learned positions end.
    """
    # All is read but the last letter of the copy.
    if model.max_len is not None and 2 * length + 1 > model.max_len:
        return 1.0
    return copy_error_bound(state_bits(model, length + 2), length, n_letters)


def longest_copy(model: LanguageModel, n_letters: int = 26) -> int | None:
    """Letters of the longest string whose copy the bound leaves possible for every string.

    Returns:
        The number; ``None`` if there is no limit, as for a state that grows by the bits of a letter
        or more.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> longest_copy(LanguageModel(ModelConfig("lstm", vocab_size=30, d_model=8)))
        122
        >>> longest_copy(LanguageModel(ModelConfig("attention", vocab_size=30, d_model=8)))
    """

    def fits(length: int) -> bool:
        return copy_error(model, length, n_letters) == 0

    too_long = 1
    while fits(too_long):
        too_long *= 2
        if too_long > _LONGEST:
            return None
    fitting = too_long // 2
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    return fitting


@dataclass(frozen=True)
class Measured:
    """How a score depends on the precision of the state.

    Attributes:
        numbers: Numbers in the state of one sequence.
        whole: Score with the state as it is.
        by_bits: Score by bits per number.
    """

    numbers: int
    whole: float
    by_bits: dict[int, float]

    @property
    def needed(self) -> int | None:
        """Fewest bits per number from which on the score is no worse than the tolerance allows."""
        enough = None
        for bits in sorted(self.by_bits, reverse=True):
            if self.by_bits[bits] < self.whole - TOLERANCE:
                break
            enough = bits
        return enough


@torch.inference_mode()
def measure(
    model: LanguageModel,
    task: Task,
    length: int,
    *,
    bits: tuple[int, ...] = BITS,
    batches: int = 4,
    noise: bool = False,
) -> Measured:
    """Score a model whose state is rounded, just before it reads the last token of each prompt.

    In copying that is SEP: the whole copy is then a function of ``bits * numbers`` bits. Every
    number of the state is rounded to one of ``2**bits`` values, evenly spaced over the range that
    it has on other prompts of the same length. With ``noise`` it is blurred as much instead, and no
    model can gain from how the values happen to lie.

    Args:
        model: In evaluation mode.
        task: Whose ``metric`` is the score.
        length: In the task's own unit.
        bits: Per number.
        batches: Of problems; the ranges come from as many others.
        noise: Add noise in place of rounding.

    Returns:
        The scores.

    Raises:
        InputError: If the task has no prompts to answer, or there is no batch.
    """
    if not isinstance(task, GeneratedTask):
        raise InputError(
            "capacity is measured on tasks whose problems are answered by decoding, such as "
            f"copying, got {task.title!r}"
        )
    if batches < 1:
        raise InputError(f"batches must be at least 1, got {batches}")
    device = model.embedding.weight.device
    problems = [task.problems(length, index) for index in range(2 * batches)]
    states = [begin(model, prompts.to(device)) for prompts, _ in problems]
    low, high = _ranges([state.model for state in states[batches:]])
    spoil: Callable[..., State] = blur_state if noise else round_state

    def score(precision: int | None) -> float:
        total = 0.0
        for (_, answers), state in zip(problems, states[:batches], strict=False):
            spoilt = state
            if precision is not None:
                spoilt = state._replace(model=spoil(state.model, low, high, precision))
            predictions = _decode(model, spoilt, answers.shape[1]).cpu()
            total += task.score(answers, predictions)[task.metric] / batches
        return total

    leaves = pytree.tree_leaves(states[0].model)
    numbers = sum(leaf[0].numel() for leaf in leaves if leaf.is_floating_point())
    return Measured(numbers, score(None), {b: score(b) for b in bits})


def round_state(state: State, low: State, high: State, bits: int) -> State:
    """The state with each number rounded to the middle of one of ``2**bits`` parts of its range.

    What is no floating-point number stays, such as positions.

    Example:
        >>> round_state(torch.tensor([0.0, 0.2, 0.9, 3.0]), torch.zeros(4), torch.ones(4), bits=1)
        tensor([0.2500, 0.2500, 0.7500, 0.7500])
    """

    def rounded(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        size = (most - least) / 2**bits
        part = ((x - least) / size).nan_to_num().floor().clamp(0, 2**bits - 1)
        return least + (part + 0.5) * size

    return pytree.tree_map(rounded, state, low, high)


def blur_state(state: State, low: State, high: State, bits: int) -> State:
    r"""The state with uniform noise on each number, as wide as a ``2**bits``-th of its range.

    Of a number at most :math:`\log_2(2^b + 1)` bits get through: what arrives is spread over no
    more than :math:`2^b + 1` widths of the noise. The noise is the same at every call; what is no
    floating-point number stays.

    Example:
        >>> x = torch.tensor([0.0, 0.2, 0.9, 3.0])
        >>> blurred = blur_state(x, torch.zeros(4), torch.ones(4), bits=1)
        >>> (blurred - x.clamp(0, 1)).abs().max() <= 0.25
        tensor(True)
    """
    generator = torch.Generator().manual_seed(0)

    def blurred(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        drawn = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
        return x.clamp(least, most) + (drawn - 0.5) * (most - least) / 2**bits

    return pytree.tree_map(blurred, state, low, high)


def _ranges(states: list[State]) -> tuple[State, State]:
    """Least and largest value of each number, over the rows of all states."""

    def over_rows(reduce: str, *leaves: Tensor) -> Tensor:
        return getattr(torch.cat(leaves), reduce)(dim=0, keepdim=True)

    return (
        pytree.tree_map(partial(over_rows, "amin"), *states),
        pytree.tree_map(partial(over_rows, "amax"), *states),
    )


def _decode(model: LanguageModel, state: SessionState, count: int) -> Tensor:
    session = Session(model, state, room=count)
    return torch.stack([session.step().tokens for _ in range(count)], dim=1)
