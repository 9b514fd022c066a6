"""Word problem: predict the product of all group elements so far."""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int

from stateline.errors import InputError
from stateline.settings import Count
from stateline.tasks.base import Batch, LabelledTask, train_settings

Permutation = tuple[int, ...]

_GENERATORS: dict[str, list[Permutation]] = {
    "s3": [(1, 0, 2), (1, 2, 0)],
    "s5": [(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)],
    "a5": [(1, 2, 0, 3, 4), (1, 2, 3, 4, 0)],
}
_LARGEST_CYCLE = 256


@dataclass(eq=False, kw_only=True)
class WordProblem(LabelledTask):
    r"""Multiply the elements of a group, and give the product so far at every token.

    .. math:: p_0 = 1, \qquad p_t = p_{t-1}\, a_t, \qquad \text{label}_t = p_t

    Elements are permutations of n things. A factor permutes the current arrangement: in ``s3``,
    ``(1, 0, 2)`` swaps the first two things, and ``(1, 2, 0)`` moves the first thing to the end.

    Factors are drawn uniformly from the generators and the identity, or from all elements. The
    generators are a swap and a rotation for ``s3`` and ``s5``, a rotation of three things and one
    of all five for ``a5``, and a rotation for a cyclic group ``z<n>`` (``z2`` is parity). Factors
    have the first ids: the generators in this order, then the identity. Labels follow: all elements
    in lexicographic order.

    Args:
        group: ``s3``, ``s5``, ``a5`` or ``z<n>``, such as ``z60``, n up to 256.
        inputs: What the factors are drawn from: ``"generators"`` or all ``"elements"``.
        **options: See :class:`~stateline.tasks.LabelledTask`; a factor is a token.

    Example:
        >>> task = WordProblem(length=6)
        >>> tokens, targets = task.train_batch(0)
        >>> tokens[0], [task.elements[i] for i in (targets[0] - task.n_inputs).tolist()][3:]
        (tensor([1, 2, 2, 0, 1, 1]), [(2, 1, 0), (1, 0, 2), (0, 2, 1)])

    References:
        Barrington, "Bounded-width polynomial-size branching programs recognize exactly those
        languages in NC1", 1989: for groups that are not solvable, such as A5 and S5, the problem is
        complete for NC1, the problems solved by circuits of logarithmic depth.
    """

    title = "Word problem"
    about = (
        "Shows whether a model can track a state that every token changes. For models of fixed "
        "depth, accuracy falls with the position, so the last quarter shows more than the mean. "
        "For a group of n elements, a guess is right once in n."
    )
    training = train_settings(LabelledTask, steps=1500, lr=4e-3)

    group: str = "s3"
    inputs: Literal["generators", "elements"] = "generators"
    batch_size: Count = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        generators = _generators(self.group)
        identity = tuple(range(len(generators[0])))
        self.elements = _closure(identity, generators)
        factors = [*generators, identity] if self.inputs == "generators" else self.elements
        self.n_inputs = len(factors)
        number = {element: index for index, element in enumerate(self.elements)}
        self._after = np.array([[number[_product(e, f)] for f in factors] for e in self.elements])
        self.vocab_size = self.n_inputs + len(self.elements)

    def draw(self, rng: np.random.Generator, count: int, length: int, *, training: bool) -> Batch:  # noqa: ARG002
        """Draw rows of ``length`` factors."""
        factors = rng.integers(self.n_inputs, size=(count, length))
        products = self._products(factors)
        return Batch(torch.from_numpy(factors), torch.from_numpy(self.n_inputs + products))

    def _products(self, factors: Int[np.ndarray, "rows length"]) -> Int[np.ndarray, "rows length"]:
        product = np.zeros(len(factors), dtype=np.int64)  # the identity is the first element
        products = np.empty_like(factors)
        for place, factor in enumerate(factors.T):
            product = self._after[product, factor]
            products[:, place] = product
        return products


def _generators(group: str) -> list[Permutation]:
    cycle = re.fullmatch(r"z([1-9]\d{0,2})", group)
    if cycle and 2 <= (n := int(cycle[1])) <= _LARGEST_CYCLE:
        return [(*range(1, n), 0)]
    if group not in _GENERATORS:
        raise InputError(
            f"group must be {', '.join(_GENERATORS)} or z<n>, n from 2 to {_LARGEST_CYCLE}, "
            f"got group={group}"
        )
    return _GENERATORS[group]


def _closure(identity: Permutation, generators: list[Permutation]) -> list[Permutation]:
    """All products of generators, in order."""
    elements, found = [identity], {identity}
    for element in elements:  # the list grows during the loop
        new = {_product(element, factor) for factor in generators} - found
        elements += new
        found |= new
    return sorted(elements)


def _product(element: Permutation, factor: Permutation) -> Permutation:
    return tuple(element[place] for place in factor)
