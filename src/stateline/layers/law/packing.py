"""Clauses about packed rows: a document is read as if it stood in a row of its own."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.law.case import Case, finite, rounded_once
from stateline.layers.law.gradients import compare, gradients
from stateline.layers.law.report import Finding
from stateline.layers.state import State, cat_states, select_rows

SHARES = (0.15, 0.4, 0.8)
"""Share of the positions at which a document begins."""


LIMITS = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Largest error of outputs, relative to their norm, and of gradients, by dtype of the check."""

ROUNDINGS = 16
"""Results in float32 may also differ by this many times what one rounding changes.

Packed and separate rows add the same numbers in another order, so both round differently. A result
can depend on roundings very much: where a normalisation divides by little, the gradients of
separate rows in float32 differ from those in float64 by up to 1e-5. So no fixed limit near 1e-6 can
hold. What one rounding of all weights and inputs changes is measured in float64, for each layer. A
sum of 256 terms gathers the root of 256 such roundings. ``python examples/packing_law.py`` shows
what all of ours reach.
"""

Grads = dict[str, Tensor]


def packed_rows_agree(case: Case) -> Iterator[Finding]:
    """Packed rows agree with documents in rows of their own."""
    masks = [_starts(case, share) for share in SHARES]
    errors = {"packed = separate": 0.0, "packed = separate, from a state": 0.0}
    plain, continued = errors
    state, x, limit = case.warm(), case.x, LIMITS[case.dtype]
    allowed = dict.fromkeys(errors, limit)
    with torch.no_grad():
        for starts in masks:
            found = case.layer(x, starts=starts)
            errors[plain] = max(errors[plain], _apart(found, _separately(case, x, starts)[0]))
            found, left = case.layer.forward_chunk(x, state, starts=starts)
            wanted, after = _separately(case, x, starts, state)
            following = [case.layer.forward_chunk(x, own)[0] for own in (left, after)]
            error = max(_apart(found, wanted), _apart(*following))
            errors[continued] = max(errors[continued], error)
            if case.dtype == torch.float32:
                for clause, own in zip(errors, (None, state), strict=True):

                    def outputs(
                        case: Case, x: Tensor, own: State | None, starts: Tensor = starts
                    ) -> Tensor:
                        return _separately(case, x, starts, own)[0]

                    more = limit + ROUNDINGS * _apart(*rounded_once(case, own, outputs))
                    allowed[clause] = max(allowed[clause], more)
    for clause, error in errors.items():
        yield Finding(clause, error, allowed[clause])

    weight = torch.randn_like(found)
    for clause, own in zip(errors, (None, state), strict=True):
        packed, separate = (
            _gradients(read, case, x, masks[0], own, weight) for read in (_packed, _separately)
        )
        if case.dtype == torch.float64:
            yield compare(f"gradients: {clause}", packed, separate, limit)
        else:

            def joined(case: Case, x: Tensor, own: State | None) -> Tensor:
                wide = weight.double()
                return _joined(_gradients(_separately, case, x, masks[0], own, wide))

            error = _apart(_joined(packed), _joined(separate))
            more = limit + ROUNDINGS * _apart(*rounded_once(case, own, joined))
            yield Finding(f"gradients: {clause}", error, more)


def _apart(a: Tensor, b: Tensor) -> float:
    """The difference, relative to the norm."""
    return finite((a.to(b.dtype) - b).norm() / (float(b.norm()) or 1.0))


def _joined(gradients: Grads) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def _gradients(
    read: Callable[..., tuple[Tensor, State]],
    case: Case,
    x: Tensor,
    starts: Tensor,
    state: State | None,
    weight: Tensor,
) -> Grads:
    """Gradients of a projection of the outputs, also with respect to the input and the state."""
    x = x.clone().requires_grad_(x.is_floating_point())
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
    found: tuple[Tensor, State] = case.layer.forward_chunk(x, state, starts=starts)
    return found


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
