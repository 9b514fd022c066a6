"""Clauses about gradients: all ways to run a layer agree, and autograd finds the derivative."""

import copy
import math
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stateline.layers.base import LOW_PRECISION
from stateline.layers.law.case import Case, chooses, fields, finite, relative
from stateline.layers.law.report import Finding, explained
from stateline.layers.state import State

STEPS = (2e-7, 1e-7)
"""Steps of the central differences, relative to the largest entry of each tensor.

In float64, a step h has an error of about h**2 f''' from the curvature and 1e-16 f / h from
rounding. If the two differ, as at a kink, or where a layer computes in float32, they say nothing.
In half precision, such steps change no number at all.
"""

DERIVATIVE_LIMIT = 1e-6
"""Largest error of a derivative against central differences: 100 times that of our layers."""


def gradients_agree(case: Case) -> Iterator[Finding]:
    """Gradients agree."""
    x = case.x.clone().requires_grad_(case.x.is_floating_point())
    weight = torch.randn_like(case.layer(case.x))
    whole = gradients(case, x, case.layer(x), weight, ())
    yield from _agree(case, "gradients: {} = forward", x, weight, whole)
    yield _reach(case, whole)
    judged = case.dtype == torch.float64 and whole and not chooses(case.layer)
    if judged and not _uses_half_precision(case):
        yield _derivative(case, x, weight, whole)

    state = _asking(case.warm())
    whole = gradients(case, x, case.layer.forward_chunk(x, state)[0], weight, state)
    yield from _agree(case, "gradients from a state: {}", x, weight, whole, state)


def _asking(state: State) -> State:
    """The state, whose numbers now ask for gradients."""
    return pytree.tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, state)


def _agree(
    case: Case,
    clause: str,
    x: Tensor,
    weight: Tensor,
    whole: dict[str, Tensor],
    state: State = (),
) -> Iterator[Finding]:
    """Chunks and steps have the gradients of the whole."""
    runs = {"chunks": partial(case.run, x, case.chunks), "steps": partial(case.by_steps, x)}
    for (told, run), verb in zip(runs.items(), case.verbs(), strict=True):
        y, _ = run(state if fields(state) else case.init())
        found = gradients(case, x, y, weight, state)
        causes = _causes(case, verb, found, whole)
        yield compare(clause.format(told), found, whole, case.limit, causes)


def _causes(
    case: Case, verb: str, found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> Iterator[str]:
    """Where a gradient stops, or is not a number."""
    if names := ", ".join(_without_gradient(case, verb)):
        yield f"{verb} passes no gradient through its state: {names}"
    if names := ", ".join(_cut_off(case, verb)):
        yield f"{verb} passes no gradient through the state that it returns: {names}"
    if lost := [name for name, grad in found.items() if not grad.isfinite().all()]:
        yield f"the gradient that {verb} gives {lost[0]} is not a number"
    if lost := [name for name, grad in wanted.items() if grad.any() and not found[name].any()]:
        yield f"init_state or {verb} passes no gradient to {', '.join(lost)}, forward does"


def _without_gradient(case: Case, verb: str) -> Iterator[str]:
    """Fields of a state that change the output of a method, but get no gradient from it."""
    state, call = _asking(case.warm()), case.verbs()[verb]
    y, _ = call(case.x, state)
    asking = {name: t for name, t in fields(state).items() if t.requires_grad}
    if not y.requires_grad or not asking:
        return
    grads = torch.autograd.grad(
        y.sum(), [*asking.values()], allow_unused=True, materialize_grads=True
    )
    for (name, field), grad in zip(asking.items(), grads, strict=True):
        if not grad.any():
            with torch.no_grad():
                kept = field.clone()
                field.add_(torch.randn_like(field), alpha=0.1)
                moved = relative(call(case.x, state)[0], y)
                field.copy_(kept)
            if moved > case.limit:
                yield name


def _cut_off(case: Case, verb: str) -> Iterator[str]:
    """Fields of a returned state that depend on the input, but not for autograd."""
    call, start = case.verbs()[verb], _asking(case.warm())
    after, other = (call(x, start)[1] for x in (case.x, case.example(*case.x.shape[:2])))
    for (name, field), second in zip(fields(after).items(), fields(other).values(), strict=True):
        floats = field.is_floating_point() and field.shape == second.shape
        if floats and not field.requires_grad and not field.equal(second):
            yield name


def gradients(case: Case, x: Tensor, y: Tensor, weight: Tensor, state: State) -> dict[str, Tensor]:
    """Gradients of a random projection of the output, by name; zero where nothing flows."""
    targets: dict[str, Tensor] = dict(case.layer.named_parameters())
    targets["the input"] = x
    targets |= {f"{name} of the state": field for name, field in fields(state).items()}
    targets = {name: t for name, t in targets.items() if t.requires_grad and t.numel()}
    inputs = list(targets.values())
    grads = torch.autograd.grad(
        (y * weight).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    return dict(zip(targets, grads, strict=True))


def compare(
    clause: str,
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    limit: float,
    causes: Iterable[str] = (),
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
    causes = chain(causes, [f"{clause} does not hold: {worst}"])
    return explained(clause, errors[worst], limit, causes)


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
    cause = f"no method passes a gradient to {worst}, which is used"
    clause = "every parameter gets its gradient"
    return explained(clause, errors[worst], case.limit, iter([cause]))


class _HalfPrecision(TorchDispatchMode):
    """Notes whether an op returns a tensor in half precision."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.seen |= any(isinstance(t, Tensor) and t.dtype in LOW_PRECISION for t in leaves)
        return result


@torch.no_grad()
def _uses_half_precision(case: Case) -> bool:
    with _HalfPrecision() as mode:
        case.layer(case.x)
    return mode.seen


def _derivative(case: Case, x: Tensor, weight: Tensor, grads: dict[str, Tensor]) -> Finding:
    """Autograd and central differences agree along a random direction of all tensors together."""
    tensors = {**dict(case.layer.named_parameters()), "the input": x}
    start = {name: t.detach() for name, t in tensors.items()}
    ways = {name: torch.randn_like(t) * (start[name].abs().max() or 1) for name, t in grads.items()}
    slopes = {name: float((grad * ways[name]).sum()) for name, grad in grads.items()}
    scale = math.hypot(*slopes.values()) or 1.0

    @torch.no_grad()
    def value(names: Collection[str], size: float) -> Tensor:
        moved = {n: t + size * ways[n] if n in names else t for n, t in start.items()}
        x = moved.pop("the input")
        return (functional_call(case.layer, moved, (x,)) * weight).sum()

    def error(names: Collection[str]) -> float:
        slope = sum(slopes[name] for name in names)
        differences = [(value(names, h) - value(names, -h)) / (2 * h) for h in STEPS]
        told = finite((differences[0] - differences[1]).abs() / scale) <= DERIVATIVE_LIMIT
        return finite((differences[0] - slope).abs() / scale) if told else 0.0

    def causes() -> Iterator[str]:
        wrong = ", ".join(name for name in grads if error([name]) > DERIVATIVE_LIMIT)
        told = f"in all methods alike, a gradient is not the derivative of the output: {wrong}"
        yield f"{told} (an estimate by design declares chooses = True)"

    return explained("gradients are derivatives", error(grads), DERIVATIVE_LIMIT, causes())
