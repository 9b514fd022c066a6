"""Diagnosis of a layer that breaks the law: one sentence, found by short experiments.

The experiments go from causes to consequences: a method that changes its input also makes outputs
differ, so changed inputs are tested first. The first experiment that finds something is reported.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import one_line
from stateline.layers.base import AnyLayer
from stateline.layers.law.case import Case, relative
from stateline.layers.law.outputs import misfits
from stateline.layers.law.report import Finding
from stateline.layers.state import cat_states, copied, named_leaves, select_rows

Verb = Callable[[Tensor, Any], tuple[Tensor, Any]]


def diagnose(case: Case, findings: Sequence[Finding]) -> str:
    """The first cause that an experiment finds; else the first clause that is broken."""
    for experiment in _EXPERIMENTS:
        fresh = replace(case, layer=copy.deepcopy(case.layer), x=case.x.clone())  # both may change
        with torch.set_grad_enabled(experiment in _WITH_GRADIENTS):
            if told := next(_run(experiment, fresh), ""):
                return told
    broken = next(finding for finding in findings if not finding.ok)
    return _SAID.get(broken.clause, "{clause} does not hold: {note}").format(
        clause=broken.clause, note=broken.note.split("; ")[0] or f"an error of {broken.error:.0e}"
    )


_SAID = {
    "a state_dict loads": "a state_dict does not hold the whole layer: {note}",
    "a saved state loads": "a saved state does not load as it was: {note}",
    "settings are kept": "a saved state cannot know its layer: {note}",
    "state_bytes is true": "state_bytes is wrong: {note}",
    "no chunk stays in memory": "the state keeps the memory of a whole chunk alive: {note}",
    "every parameter gets its gradient": "no method passes a gradient to {note}, which is used",
    "no output sees a later input, in training": "in training mode, {note}",
    "bfloat16 runs, accumulators float32": "in bfloat16, {note}",
}
"""The sentences of the clauses that have no experiment."""


def _run(experiment: Callable[[Case], Iterator[str]], case: Case) -> Iterator[str]:
    """The findings of an experiment, up to the point where the layer raises."""
    try:
        yield from experiment(case)
    except Exception:
        return


def _verbs(case: Case) -> dict[str, Verb]:
    """The methods that continue from a state, as functions of a sequence of any length."""

    def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = case.layer.step(x[:, 0], state)
        return y[:, None], state

    return {"forward_chunk": case.layer.forward_chunk, "step": step}


def _leaves(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by their fields."""
    return {name.removeprefix(".") or "the state": leaf for name, leaf in named_leaves(state)}


def _differing(case: Case, first: Any, second: Any) -> list[str]:
    """Fields in which two states differ."""
    one, other = _leaves(first), _leaves(second)
    return [
        name
        for name in one
        if one[name].shape != other[name].shape
        or relative(one[name].to(case.dtype), other[name].to(case.dtype)) > case.limit
    ]


def _by_position(found: Tensor, wanted: Tensor) -> Tensor:
    """Largest difference at each position."""
    return (found - wanted).abs().flatten(2).amax(dim=(0, 2))


def _state_has_rows(case: Case) -> Iterator[str]:
    rows = case.x.shape[0]
    for name, leaf in _leaves(case.init()).items():
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            yield f"{name} of the state has no row for each of {rows} sequences: {[*leaf.shape]}"


def _input_changes(case: Case) -> Iterator[str]:
    for verb, call in _verbs(case).items():
        state, x = copied(case.warm()), case.x.clone()
        before = copied(state)
        _, after = call(x, state)
        if changed := _differing(case, before, state):
            yield f"{verb} changes its input state: {', '.join(changed)}"
        if not torch.equal(x, case.x):
            yield f"{verb} changes its input"
        for leaf in pytree.tree_leaves(after):
            leaf.zero_()
        if shared := _differing(case, before, state):
            yield f"the state that {verb} returns shares memory with its input: {', '.join(shared)}"
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "forward": case.layer,
        "step_": lambda x: case.layer.step_(x[:, 0], case.init(capacity=1)),
    }
    for verb, run in others.items():
        x = case.x.clone()
        run(x)
        if not torch.equal(x, case.x):
            yield f"{verb} changes its input"


def _random(case: Case) -> Iterator[str]:
    """Two copies of the layer return the same."""
    state = case.warm()
    calls: dict[str, Callable[[AnyLayer], Any]] = {
        "init_state": lambda layer: layer.init_state(len(case.x)),
        "forward": lambda layer: layer(case.x),
        "forward_chunk": lambda layer: layer.forward_chunk(case.x, state),
        "step": lambda layer: layer.step(case.x[:, 0], state),
    }
    for verb, call in calls.items():
        first, second = (call(copy.deepcopy(case.layer)) for _ in range(2))
        if _differing(case, first, second):
            yield f"{verb} draws random numbers: two calls with one input return two results"


def _memory(case: Case) -> Iterator[str]:
    """The results of a method depend only on its arguments."""
    first = case.init(capacity=case.x.shape[1])
    before = copied(first)
    case.by_steps_in_place(case.x, first)
    if changed := _differing(case, before, case.init(capacity=case.x.shape[1])):
        yield f"init_state returns the same memory every time: {', '.join(changed)}"
    for verb, call in _verbs(case).items():
        state, x = case.warm(), case.x
        y, _ = call(x, copied(state))
        call(case.example(*x.shape[:2]), case.warm())
        if relative(call(x, copied(state))[0], y) > case.limit:
            yield f"{verb} remembers earlier calls: its state is not only in its arguments"


def _future(case: Case) -> Iterator[str]:
    verbs: dict[str, Callable[[Tensor], Tensor]] = {
        "forward": case.layer,
        "forward_chunk": lambda x: case.layer.forward_chunk(x, case.init(len(x)))[0],
    }
    other = case.example(*case.x.shape[:2])
    for verb, call in verbs.items():
        y = call(case.x)
        for place in range(1, case.x.shape[1]):
            x = case.x.clone()
            x[:, place] = other[:, place]
            moved = _by_position(call(x), y)[:place]
            if float(moved.max()) > case.limit * (float(y.abs().max()) or 1.0):
                seen = int(moved.argmax())
                yield f"{verb} at position t sees x[t+{place - seen}] (t = {seen})"


def _rows(case: Case) -> Iterator[str]:
    def continuing(call: Verb, state: Any) -> Callable[[Tensor], tuple[Tensor, Any]]:
        return lambda x: call(x, copied(state))

    verbs: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
        "forward": lambda x: (case.layer(x), ()),
        **{verb: continuing(call, case.warm()) for verb, call in _verbs(case).items()},
    }
    changed, others = case.x.clone(), range(1, len(case.x))
    changed[0] = case.example(1, case.x.shape[1])[0]
    for verb, call in verbs.items():
        (y, after), (y_changed, after_changed) = call(case.x), call(changed)
        if relative(y_changed[1:], y[1:]) > case.limit:
            yield f"{verb} mixes rows: the outputs of a row depend on other rows"
        rows = [select_rows(state, others) for state in (after, after_changed)]
        if after and (mixed := _differing(case, *rows)):
            yield f"{verb} mixes rows in its state: {', '.join(mixed)}"


def _state_is_used(case: Case) -> Iterator[str]:
    """The output depends on the state, if the output of forward depends on earlier inputs."""
    head = case.chunks[0]
    x = case.x.clone()
    x[:, :head] = case.example(case.x.shape[0], head)
    if relative(case.layer(case.x)[:, head:], case.layer(x)[:, head:]) <= case.limit:
        return
    states = [case.layer.forward_chunk(own[:, :head], case.init())[1] for own in (case.x, x)]
    for verb, call in _verbs(case).items():
        start = case.init()
        if not _differing(case, start, call(case.x, copied(start))[1]):
            yield f"{verb} returns its state as it was: nothing is carried on"
        if not _differing(case, *states):
            yield "forward_chunk returns a state that does not depend on its input"
        outputs = [call(case.x[:, head:], copied(state))[0] for state in states]
        if relative(*outputs) <= case.limit:
            yield f"{verb} ignores its state"


def _outputs(case: Case) -> Iterator[str]:
    x, head = case.x, case.chunks[0]
    whole = case.layer(x)
    once, wanted = case.layer.forward_chunk(x, case.init())
    if relative(once, whole) > case.limit:
        apart = _by_position(once, whole) / float(whole.abs().max() or 1.0)
        places = (~(apart <= case.limit)).nonzero()
        where = f"first at position {int(places[0])}" if len(places) else "though each is near"
        yield f"forward_chunk from an initial state is not forward, {where}"
    _, begun = case.layer.forward_chunk(x[:, :head], case.init())
    rest, end = case.layer.forward_chunk(x[:, head:], begun)
    fields = _differing(case, end, wanted)
    if relative(rest, whole[:, head:]) > case.limit or fields:
        state = f": {', '.join(fields)} of two chunks is not that of one" if fields else ""
        yield f"forward_chunk does not go on where the chunk before ended{state}"


def _steps(case: Case) -> Iterator[str]:
    x, head = case.x, case.chunks[0]
    _, begun = case.layer.forward_chunk(x[:, :head], case.init(capacity=2))
    donated = copied(begun)
    y, after = case.layer.step(x[:, head], begun)
    y_chunk, after_chunk = case.layer.forward_chunk(x[:, head : head + 1], begun)
    if relative(y, y_chunk[:, 0]) > case.limit:
        yield "step returns another output than forward_chunk of one token"
    if fields := _differing(case, after, after_chunk):
        yield f"step returns another state than forward_chunk of one token: {', '.join(fields)}"
    if relative(case.layer.step_(x[:, head], donated), y) > case.limit:
        yield "step_ returns another output than step"
    following = (case.layer.step(x[:, head + 1], own)[0] for own in (donated, after))
    if relative(*following) > case.limit:
        same = not _differing(case, donated, begun)
        yield f"step_ leaves {'its state as it was' if same else 'another state than step'}"


def _ages(case: Case) -> Iterator[str]:
    head, rows = case.chunks[0], case.x.shape[0]
    short = case.layer.forward_chunk(case.x[:, :head], case.init())[1]
    long = case.layer.forward_chunk(case.x, case.init())[1]
    alone = [case.layer.forward_chunk(case.x, copied(own))[0] for own in (short, long)]
    try:
        joined = cat_states([short, long])
    except Exception as error:
        yield f"states after different numbers of tokens cannot be joined (cat): {one_line(error)}"
        return
    y, _ = case.layer.forward_chunk(torch.cat([case.x, case.x]), joined)
    pairs = zip(y.split(rows), alone, strict=True)
    shorter, longer = (relative(own, wanted) > case.limit for own, wanted in pairs)
    if shorter or longer:
        which = "all" if shorter and longer else "shorter" if shorter else "longer"
        told = "rows with different numbers of tokens are treated as equally long"
        yield f"{told}: the {which} rows come out wrong"


def _packed(case: Case) -> Iterator[str]:
    x, state, half = case.x, case.warm(), case.x.shape[1] // 2
    starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    starts[:, half] = True
    calls: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
        "forward": lambda x: (case.layer(x, starts=starts), ()),
        "forward_chunk": lambda x: case.layer.forward_chunk(x, state, starts=starts),
    }
    other = torch.cat([case.example(*x.shape[:2])[:, :half], x[:, half:]], dim=1)
    alone = {
        "forward": case.layer(x[:, half:]),
        "forward_chunk": case.layer.forward_chunk(x[:, half:], case.init())[0],
    }
    for verb, call in calls.items():
        (y, after), (y_other, after_other) = call(x), call(other)
        seen = _by_position(y, y_other)[half:]
        places = (seen > case.limit * float(y.abs().max())).nonzero()
        if len(places):
            told = f"first at its position {int(places[0])}"
            yield f"{verb} with starts sees the document before, {told}"
        if left := _differing(case, after, after_other):
            yield f"{verb} with starts leaves the document before in {', '.join(left)}"
        if relative(y[:, half:], alone[verb]) > case.limit:
            yield f"{verb} with starts does not reset the state: positions or settings continue"


def _gradients(case: Case) -> Iterator[str]:
    """Gradients of the parameters, by forward and by one chunk."""
    parameters = {n: p for n, p in case.layer.named_parameters() if p.requires_grad}
    outputs = {
        "forward": case.layer(case.x),
        "forward_chunk": case.layer.forward_chunk(case.x, case.init())[0],
    }
    found: dict[str, dict[str, Tensor]] = {}
    for verb, y in outputs.items():
        own = torch.autograd.grad(
            y.sum(), [*parameters.values()], allow_unused=True, materialize_grads=True
        )
        found[verb] = dict(zip(parameters, own, strict=True))
        if lost := [name for name, grad in found[verb].items() if not grad.isfinite().all()]:
            yield f"the gradient that {verb} gives {lost[0]} is not a number"
    chunk = found["forward_chunk"]
    if lost := [n for n, grad in found["forward"].items() if grad.any() and not chunk[n].any()]:
        yield f"init_state or forward_chunk passes no gradient to {', '.join(lost)}, forward does"


def _gradients_through_states(case: Case) -> Iterator[str]:
    for verb, call in _verbs(case).items():
        leaves, spec = pytree.tree_flatten(copied(case.warm()))
        floats = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        if not floats:
            return
        y, after = call(case.x, pytree.tree_unflatten(leaves, spec))
        passed = [leaf for leaf in pytree.tree_leaves(after) if leaf.is_floating_point()]
        if y.requires_grad:
            given = torch.autograd.grad(
                y.sum(), floats, allow_unused=True, materialize_grads=True, retain_graph=True
            )
            if not any(bool(grad.any()) for grad in given):
                yield f"{verb} passes no gradient through its state"
        if not any(leaf.requires_grad for leaf in passed):
            yield f"{verb} passes no gradient through the state that it returns"


def _dtypes(case: Case) -> Iterator[str]:
    for name, leaf in _leaves(case.init()).items():
        if leaf.is_floating_point() and leaf.dtype != case.dtype:
            told = f"{leaf.dtype} in a layer of {case.dtype}"
            yield f"init_state makes {name} of the state {told}: give it the dtype of a weight"


_WITH_GRADIENTS = (_gradients, _gradients_through_states)

_EXPERIMENTS = (
    _state_has_rows,
    misfits,
    _input_changes,
    _random,
    _memory,
    _future,
    _rows,
    _state_is_used,
    _dtypes,
    _outputs,
    _steps,
    _ages,
    _packed,
    *_WITH_GRADIENTS,
)
