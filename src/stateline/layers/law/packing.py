"""Clauses about packed rows: a document is read as if it stood in a row of its own."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.law.case import Case, relative
from stateline.layers.law.gradients import compare, gradients
from stateline.layers.law.report import Finding
from stateline.layers.state import State, cat_states, select_rows

SHARES = (0.15, 0.4, 0.8)
"""Share of the positions at which a document begins."""


def packed_rows_agree(case: Case) -> Iterator[Finding]:
    """Packed rows agree with documents in rows of their own."""
    masks = [_starts(case, share) for share in SHARES]
    errors = {"packed = separate": 0.0, "packed = separate, from a state": 0.0}
    plain, continued = errors
    state, x = case.warm(), case.x
    with torch.no_grad():
        for starts in masks:
            found = case.layer(x, starts=starts)
            errors[plain] = max(errors[plain], relative(found, _separately(case, x, starts)[0]))
            found, left = case.layer.forward_chunk(x, state, starts=starts)
            wanted, after = _separately(case, x, starts, state)
            following = [case.layer.forward_chunk(x, own)[0] for own in (left, after)]
            error = max(relative(found, wanted), relative(*following))
            errors[continued] = max(errors[continued], error)
    for clause, error in errors.items():
        yield Finding(clause, error, case.limit / 10)

    x = x.clone().requires_grad_(x.is_floating_point())
    weight = torch.randn_like(found)
    leaves, spec = pytree.tree_flatten(state)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    state = pytree.tree_unflatten(leaves, spec)
    outputs = (
        (case.layer(x, starts=masks[0]), _separately(case, x, masks[0])[0]),
        (
            case.layer.forward_chunk(x, state, starts=masks[0])[0],
            _separately(case, x, masks[0], state)[0],
        ),
    )
    for clause, pair in zip(errors, outputs, strict=True):
        packed, separate = (gradients(case, x, y, weight, leaves) for y in pair)
        yield compare(f"gradients: {clause}", packed, separate, case.limit)


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
