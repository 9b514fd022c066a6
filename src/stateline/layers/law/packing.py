"""Clauses about packed rows: a document is read as if it stood in a row of its own."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.law.case import (
    Case,
    by_position,
    change_by_rounding,
    differing,
    finite,
    relative,
)
from stateline.layers.law.gradients import compare, gradients
from stateline.layers.law.report import Finding, explained
from stateline.layers.state import State, cat_states, select_rows

SHARES = (0.15, 0.4, 0.8)
"""Share of the positions at which a document begins."""

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Largest error of outputs, relative to their norm, and of gradients, by dtype of the check."""

ROUNDINGS = 4
"""In float32, the limit is at least this multiple of the change by one rounding of all factors.

Packed and separate rows take the same inputs and weights, but add their products in another order,
so both round differently, as if input and weights had been rounded. Where a norm divides by a
number near zero, one rounding changes outputs by some 1e-6, so no fixed limit near 1e-6 can hold.
``python examples/packing_law.py`` prints the errors of all layers.
"""

Grads = dict[str, Tensor]
Read = Callable[[Case, Tensor, Tensor, State | None], tuple[Tensor, State]]


def packed_rows_agree(case: Case) -> Iterator[Finding]:
    """Packed rows agree with documents in rows of their own."""
    masks, state = [_starts(case, share) for share in SHARES], case.warm()
    for clause, own in (("packed = separate", None), ("packed = separate, from a state", state)):
        with torch.no_grad():
            errors = [_output_error(case, starts, own) for starts in masks]
        error = max(errors)
        starts = masks[errors.index(error)]
        limit = _limit(case, error, own, partial(_outputs, starts=starts))
        yield explained(clause, error, limit, _causes(case, own, starts))

        told, starts = f"gradients: {clause}", masks[0]
        weight = torch.randn_like(case.layer(case.x))
        packed, separate = (
            _gradients(read, case, starts, own, weight) for read in (_packed, _separately)
        )
        if case.dtype == torch.float64:
            yield compare(told, packed, separate, LIMITS[case.dtype])
        else:
            error = _apart(_joined(packed), _joined(separate))
            run = partial(_joined_gradients, starts=starts, weight=weight.double())
            yield Finding(told, error, _limit(case, error, own, run))


@torch.no_grad()
def _causes(case: Case, state: State | None, wrong: Tensor) -> Iterator[str]:
    """What a document that begins in the middle sees of the one before; else, the wrong states."""
    x, half = case.x, case.x.shape[1] // 2
    verb = "forward with starts" if state is None else "forward_chunk with starts"
    starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    starts[:, half] = True
    other = torch.cat([case.example(*x.shape[:2])[:, :half], x[:, half:]], dim=1)
    (y, after), (y_other, after_other) = (_packed(case, own, starts, state) for own in (x, other))
    seen = by_position(y, y_other)[half:]
    places = (seen > case.limit * y.abs().max()).nonzero()
    if len(places):
        yield f"{verb} sees the document before, first at its position {int(places[0])}"
    if left := differing(after, after_other, case.limit):
        yield f"{verb} leaves the document before in {left}"
    if relative(y[:, half:], _separately(case, x, starts, state)[0][:, half:]) > case.limit:
        yield f"{verb} does not reset the state: positions or settings continue"
    left, after = (read(case, case.x, wrong, state)[1] for read in (_packed, _separately))
    if names := differing(left, after, case.limit):
        yield f"{verb} leaves another state than the last documents: {names}"


def _output_error(case: Case, starts: Tensor, state: State | None) -> float:
    """The error of the outputs, and of outputs that continue from the final states."""
    (y, left), (wanted, after) = (
        read(case, case.x, starts, state) for read in (_packed, _separately)
    )
    if state is None:
        return _apart(y, wanted)
    following = [case.layer.forward_chunk(case.x, own)[0] for own in (left, after)]
    return max(_apart(y, wanted), _apart(*following))


def _limit(
    case: Case, error: float, state: State | None, run: Callable[[Case, State | None], Tensor]
) -> float:
    """The limit, or in float32 the effect of four roundings if larger."""
    limit = LIMITS[case.dtype]
    if error <= limit or case.dtype == torch.float64:
        return limit
    return max(limit, ROUNDINGS * change_by_rounding(case, state, run, _apart, case.dtype))


def _apart(a: Tensor, b: Tensor) -> float:
    """The difference, relative to the norm."""
    return finite((a.to(b.dtype) - b).norm() / (float(b.norm()) or 1.0))


def _joined(gradients: Grads) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def _outputs(case: Case, state: State | None, *, starts: Tensor) -> Tensor:
    with torch.no_grad():
        return _separately(case, case.x, starts, state)[0]


def _joined_gradients(case: Case, state: State | None, *, starts: Tensor, weight: Tensor) -> Tensor:
    return _joined(_gradients(_separately, case, starts, state, weight))


def _gradients(
    read: Read, case: Case, starts: Tensor, state: State | None, weight: Tensor
) -> Grads:
    """Gradients of a projection of the outputs, also with respect to the input and the state."""
    x = case.x.clone().requires_grad_(case.x.is_floating_point())
    leaves, spec = pytree.tree_flatten(state)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in leaves if t is not None]
    y, _ = read(case, x, starts, pytree.tree_unflatten(leaves, spec) if leaves else None)
    return gradients(case, x, y, weight, leaves)


def _packed(
    case: Case, x: Tensor, starts: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """All documents in one call."""
    if state is None:
        return case.layer(x, starts=starts), ()
    return case.layer.forward_chunk(x, state, starts=starts)


def _starts(case: Case, share: float) -> Bool[Tensor, "batch length"]:
    """Random starts; a document begins at the end of the first row, but not with that row."""
    starts = torch.rand(case.x.shape[:2]) < share
    starts[0, 0], starts[0, -1], starts[1:, 0] = False, True, True
    return starts.to(case.x.device)


def _separately(
    case: Case, x: Tensor, starts: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """Each document in a call of its own: outputs, and the states after the last ones."""
    outputs, left = [], []
    for row, begins in enumerate(starts.tolist()):
        own, parts = None if state is None or begins[0] else select_rows(state, [row]), []
        borders = [place for place, begun in enumerate(begins) if begun or not place]
        for start, stop in zip(borders, [*borders[1:], len(begins)], strict=True):
            document = x[row : row + 1, start:stop]
            if state is None:
                y = case.layer(document)
            else:
                y, own = case.layer.forward_chunk(document, case.init(1) if own is None else own)
            parts.append(y)
            last, own = own, None
        outputs.append(torch.cat(parts, dim=1))
        left.append(last)
    return torch.cat(outputs), () if state is None else cat_states(left)
