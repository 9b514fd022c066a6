"""Clauses about gradients: all ways to run a layer agree, and no parameter is cut off."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.law.case import Case, finite, relative
from stateline.layers.law.report import Finding


def gradients_agree(case: Case) -> Iterator[Finding]:
    """Gradients agree."""
    x = case.x.clone().requires_grad_(case.x.is_floating_point())
    weight = torch.randn_like(case.layer(case.x))
    whole = gradients(case, x, case.layer(x), weight, ())
    chunked = gradients(case, x, case.run(x, case.chunks, case.init())[0], weight, ())
    stepped = gradients(case, x, case.by_steps(x, case.init())[0], weight, ())
    yield compare("gradients: chunks = forward", chunked, whole, case.limit)
    yield compare("gradients: steps = forward", stepped, whole, case.limit)
    yield _reach(case, whole)

    leaves, spec = pytree.tree_flatten(case.warm())
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    state = pytree.tree_unflatten(leaves, spec)
    whole = gradients(case, x, case.layer.forward_chunk(x, state)[0], weight, leaves)
    chunked = gradients(case, x, case.run(x, case.chunks, state)[0], weight, leaves)
    stepped = gradients(case, x, case.by_steps(x, state)[0], weight, leaves)
    yield compare("gradients from a state: chunks", chunked, whole, case.limit)
    yield compare("gradients from a state: steps", stepped, whole, case.limit)


def gradients(
    case: Case, x: Tensor, y: Tensor, weight: Tensor, leaves: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Gradients of a random projection of the output, by name; zero where nothing flows."""
    targets: dict[str, Tensor] = dict(case.layer.named_parameters())
    targets["the input"] = x
    targets |= {f"state leaf {i}": leaf for i, leaf in enumerate(leaves)}
    targets = {name: t for name, t in targets.items() if t.requires_grad and t.numel()}
    inputs = list(targets.values())
    grads = torch.autograd.grad(
        (y * weight).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    return dict(zip(targets, grads, strict=True))


def compare(
    clause: str, found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float
) -> Finding:
    """The worst of the tensors, each relative to its own largest entry.

    A tensor that is tiny beside the largest gradient (the bias of attention's keys has gradient
    zero) is judged relative to that gradient, times the root of the limit.
    """
    floor = limit**0.5 * max(float(t.abs().max()) for t in wanted.values())
    errors = {
        name: finite((found[name] - t).abs().max() / max(float(t.abs().max()), floor, 1e-300))
        for name, t in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return Finding(clause, errors[worst], limit, "" if errors[worst] <= limit else worst)


def _reach(case: Case, grads: dict[str, Tensor]) -> Finding:
    """A parameter without any gradient must not change the output when it changes."""
    errors = {"": 0.0}
    with torch.no_grad():
        for name, grad in grads.items():
            if grad.any() or name == "the input":
                continue
            twin = copy.deepcopy(case.layer)
            parameter = twin.get_parameter(name)
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            errors[name] = relative(twin(case.x), case.layer(case.x))
    worst = max(errors, key=lambda name: errors[name])
    return Finding("every parameter gets its gradient", errors[worst], case.limit, worst)
