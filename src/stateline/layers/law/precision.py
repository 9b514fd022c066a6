"""The clause about precision: half precision runs, and accumulators stay in float32."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.base import LOW_PRECISION
from stateline.layers.law.case import Case, change_by_rounding, chooses, relative
from stateline.layers.law.report import Finding
from stateline.layers.state import accumulators

LOW_PRECISION_LIMIT = 0.1
"""Largest relative error of bfloat16 against float32: the result of rounding alone."""

ROUNDINGS = 4
"""The limit is at least this multiple of the change that one rounding of weights and input makes.

A normalisation may divide by a number near zero, as in sLSTM: one rounding then changes outputs by
up to 0.2, and every product of a pass rounds its factors again.
"""


def precision(case: Case) -> Iterator[Finding]:
    """Precision is as promised."""
    low = copy.deepcopy(case.layer).float().bfloat16()  # some parameters stay float32
    full = copy.deepcopy(low).float()  # with the same rounded weights
    x = case.x.float().bfloat16() if case.x.is_floating_point() else case.x
    with torch.no_grad():
        exact = full(x.float() if x.is_floating_point() else x)
        state = low.init_state(x.shape[0], capacity=1)
        y_chunk, after = low.forward_chunk(x, state)
        y_step, after_step = low.step(x[:, 0], after)
        outputs = {"forward": low(x), "forward_chunk": y_chunk, "step": y_step}
        outputs["step_"] = low.step_(x[:, 0], after)
    faults = [
        f"in bfloat16, {verb} returns {str(y.dtype)[6:]}"
        for verb, y in outputs.items()
        if y.dtype != torch.bfloat16
    ]
    for which, found in (("init_state", state), ("forward_chunk", after), ("step", after_step)):
        if [t.dtype for t in pytree.tree_leaves(found)] != [
            t.dtype for t in pytree.tree_leaves(state)
        ]:
            faults.append(f"in bfloat16, {which} changes a dtype in the state")
        if low_names := _low_accumulators(found):
            told = f"in bfloat16, {which} keeps {', '.join(low_names)} in half precision"
            faults.append(told)
    measure = _at_half_of_the_positions if chooses(case.layer) else relative
    error = max(measure(outputs["forward"], exact), measure(y_chunk, exact))
    limit = LOW_PRECISION_LIMIT
    if error > limit:
        rounded = Case(full, x, case.chunks, case.dtype)
        change = change_by_rounding(rounded, None, _outputs, relative, torch.bfloat16)
        limit = max(limit, ROUNDINGS * change)
    yield Finding(
        "bfloat16 runs, accumulators float32",
        float("inf") if faults else error,
        limit,
        "; ".join(faults),
    )


def _outputs(case: Case, _: Any) -> Tensor:
    with torch.no_grad():
        return case.layer(case.x)


def _at_half_of_the_positions(found: Tensor, exact: Tensor) -> float:
    """The error that half of the positions have at most.

    At the others, rounding may change which experts are used.
    """
    errors = (found.to(exact.dtype) - exact).abs().amax(dim=-1)
    return float(errors.median() / exact.abs().max())


def _low_accumulators(state: Any) -> list[str]:
    """Names of accumulators in half precision."""
    if isinstance(state, Tensor):
        return []
    names = [name for name in accumulators(state) if getattr(state, name).dtype in LOW_PRECISION]
    return names + [name for part in state for name in _low_accumulators(part)]
