"""Clauses about numbers that are not finite: they stay in their document, and in its later part."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.layers.law.case import Case, finite
from stateline.layers.law.report import Finding, explained
from stateline.layers.state import State, copied

VALUES = (math.inf, math.nan)

SHORTEST = 5
"""Tokens that three documents need."""

Run = Callable[[Tensor], Tensor]


def nothing_leaks(case: Case) -> Iterator[Finding]:
    """What one document holds never reaches another, even inf and NaN."""
    # In outputs, it reaches no earlier position either. Gradients of earlier positions are left
    # out: what follows a layer in a stack, such as a norm, may give them 0 times NaN.
    if not case.x.is_floating_point() or case.x.shape[1] < SHORTEST or _refuses(case):
        return
    length, device = case.x.shape[1], case.x.device
    place = length // 2  # the document around it begins one before and ends one after
    starts = torch.zeros(case.x.shape[:2], dtype=torch.bool, device=device)
    starts[:, [place - 1, place + 2]] = True
    begun = case.warm(capacity=length)
    runs: dict[str, Run] = {
        "forward": case.layer,
        "forward with starts": partial(case.layer, starts=starts),
        "forward_chunk": lambda x: case.layer.forward_chunk(x, begun)[0],
        "forward_chunk with starts": lambda x: case.layer.forward_chunk(x, begun, starts=starts)[0],
        "two chunks with starts, cut inside the document": _cut(case, begun, starts, place + 1),
        "two chunks with starts, cut behind the document": _cut(case, begun, starts, place + 2),
        "step": lambda x: case.by_steps(x, begun)[0],
        "step_": lambda x: case.by_steps_in_place(x, copied(begun)),
    }
    weight = torch.randn_like(case.layer(case.x))
    outputs, gradients = dict[str, float](), dict[str, float]()
    for verb, run in runs.items():
        end = place + 2 if "starts" in verb else length
        kept, apart = _without(case.x, place, end), _without(case.x, place - 1, end)
        apart[0, : place - 1] &= "starts" in verb
        kept[0, -1] = False
        wanted = run(case.x).detach()
        for value in VALUES:
            with torch.no_grad():
                found = run(_spoilt(case.x, [place, -1], value))
            told = f"{value} reaches what must not see it in {verb}"
            outputs[told + _where(found, wanted, kept)] = _error(found, wanted, kept)
        if verb.startswith("step"):  # in place, there are no gradients
            continue
        wanted = _gradient(run, case.x, weight * apart[..., None])
        found = _gradient(run, _spoilt(case.x, [place], math.inf), weight * apart[..., None])
        told = f"inf reaches gradients of other rows or documents in {verb}"
        gradients[told] = _error(found, wanted, apart)
        found = _gradient(run, case.x, _spoilt(weight, [place], math.nan))
        told = f"a gradient that is NaN reaches those of other rows or documents in {verb}"
        gradients[told] = _error(found, wanted, apart)
    yield _worst("inf and NaN stay in their document", outputs, case.limit)
    yield _worst("gradients: inf and NaN stay in their document", gradients, case.limit)


def _cut(case: Case, begun: State, starts: Tensor, place: int) -> Run:
    """Two chunks, of which the second begins with the state that the first one leaves."""

    def run(x: Tensor) -> Tensor:
        outputs, state = [], begun
        for part in (slice(None, place), slice(place, None)):
            y, state = case.layer.forward_chunk(x[:, part], state, starts=starts[:, part])
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    return run


def _refuses(case: Case) -> bool:
    """Whether the layer refuses what is not finite, so that nothing can leak."""
    try:
        case.layer.check_values(_spoilt(case.x, [0], math.inf))
    except InputError:
        return True
    return False


def _worst(clause: str, errors: dict[str, float], limit: float) -> Finding:
    return explained(
        clause, max(errors.values()), limit, (told for told, e in errors.items() if not e <= limit)
    )


def _without(x: Tensor, begin: int, end: int) -> Tensor:
    """All positions but some of the first row."""
    kept = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    kept[0, begin:end] = False
    return kept


def _spoilt(x: Tensor, places: list[int], value: float) -> Tensor:
    """A copy with another value at some positions of the first row."""
    x = x.clone()
    x[0, places] = value
    return x


def _gradient(run: Run, x: Tensor, of_outputs: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(run(x), x, of_outputs, materialize_grads=True)[0]


def _error(found: Tensor, wanted: Tensor, kept: Tensor) -> float:
    """Largest difference over the largest entry, at some positions."""
    scale = float(wanted.abs().max()) or 1.0
    return finite((found[kept] - wanted[kept]).abs().max() / scale)


def _where(found: Tensor, wanted: Tensor, kept: Tensor) -> str:
    """The first position that is not finite, though it should be."""
    lost = (found.isfinite() < wanted.isfinite()).flatten(2).any(-1) & kept
    if not lost.any():
        return ""
    row, place = lost.nonzero()[0].tolist()
    return f", first at position {place} of row {row}"
