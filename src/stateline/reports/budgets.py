"""Limits on the costs of models, and the cost of a model at a length."""

import re
from typing import NamedTuple

from stateline.errors import InputError
from stateline.reports.costs import FLOPS, STATE, Cost, Interval, common_lengths, speed
from stateline.runs.results import Results

COSTS = {
    "state": STATE,
    "flops": FLOPS,
    "decode": speed("decode"),
    "prefill": speed("prefill"),
    "train": speed("train"),
}
"""Costs that a budget may limit, by name."""

_BUDGET = re.compile(
    r"(?P<name>[a-z]+)(@(?P<length>\d+))?(?P<side><=|>=)(?P<number>[\d.]+) ?(?P<unit>[a-zA-Z]*)"
)
_UNITS = {"": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Budget(NamedTuple):
    """A limit on a cost.

    Attributes:
        text: As it was given.
        cost: What is limited.
        length: The length of the limited cost; ``None``: that of the scores, see
            :func:`length_at`.
        bound: The limit: the most, or for a speed the least.
    """

    text: str
    cost: Cost
    length: int | None
    bound: float

    def allows(self, results: Results, model: str, scored: int) -> bool:
        """Whether a model that is scored at a length is within the limit.

        Without a measured cost it is not.
        """
        paid = cost_at(results, model, self.cost, self.at(results, scored))
        if paid is None:
            return False
        higher = self.cost.higher_is_better
        return paid.middle >= self.bound if higher else paid.middle <= self.bound

    def at(self, results: Results, scored: int) -> int | None:
        """The length of the limited cost, for scores at a length."""
        return length_at(results, self.cost, scored) if self.length is None else self.length

    def measured(self, results: Results, scored: int) -> bool:
        """Whether any model has this cost at this length."""
        at = self.at(results, scored)
        return any(cost_at(results, r.model, self.cost, at) for r in results.speed)


def read_budget(text: str) -> Budget:
    """A limit such as ``state<=64KiB``, ``decode>=1k`` or ``state@4096<=64KiB``.

    Raises:
        InputError: If it is malformed, or does not limit a speed from below, or others from above.
    """
    found = _BUDGET.fullmatch(text.replace(" ", ""))
    cost = COSTS.get(found["name"]) if found else None
    unit = _UNITS.get(found["unit"].lower()) if found else None
    try:
        bound = float(found["number"]) * unit if found and unit else None
    except ValueError:
        bound = None
    if found is None or cost is None or bound is None:
        raise InputError(
            f"a budget must limit {', '.join(COSTS)}, such as state<=64KiB, decode>=1k or, at one "
            f"length, state@4096<=64KiB, got {text!r:.60}"
        )
    if cost.higher_is_better != (found["side"] == ">="):
        side = ">=" if cost.higher_is_better else "<="
        raise InputError(f"a budget of {found['name']} needs {side}, got {text!r:.60}")
    return Budget(text, cost, int(found["length"]) if found["length"] else None, bound)


def length_at(results: Results, cost: Cost, scored: int) -> int | None:
    """The length of the cost that belongs to scores at a length.

    It is the shortest that is not shorter, of those at which all models have the cost, or else the
    longest; ``None`` if there is none.
    """
    lengths = common_lengths(results, cost)
    return next((n for n in lengths if n >= scored), lengths[-1] if lengths else None)


def cost_at(results: Results, model: str, cost: Cost, length: int | None) -> Interval | None:
    """A cost of a model at a length, if it was measured."""
    entry = next((entry for entry in results.speed if entry.model == model), None)
    return None if entry is None or length is None else cost.values(entry).get(length)
