"""Clauses about outputs: all ways to run a layer agree, and nothing sees what it must not see."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from stateline.errors import one_line
from stateline.layers.base import AnyLayer
from stateline.layers.law.case import Case, by_position, differing, fields, finite, relative
from stateline.layers.law.report import Finding, explained
from stateline.layers.state import copied, select_rows, shown

FIRST = 16
"""A sequence is cut after each of so many tokens; then near the borders of its chunks alone."""

MANY_ROWS = 67
"""More rows than a block of 64, and an odd number of them."""


def outputs_agree(case: Case) -> Iterator[Finding]:
    """Outputs agree."""
    with torch.no_grad():
        whole = case.layer(case.x)
        chunked, _ = case.run(case.x, case.chunks, case.init())
        stepped, _ = case.by_steps(case.x, case.init())
    error, causes = relative(chunked, whole), chain(_unused(case, "forward_chunk"), _chunks(case))
    yield explained("chunks = forward", error, case.limit, causes)
    error, causes = relative(stepped, whole), chain(_unused(case, "step"), _steps(case))
    yield explained("steps = forward", error, case.limit, causes)
    with torch.no_grad():
        errors = {place: _cut_errors(case, whole, place) for place in _cuts(case)}
    worst = max(error for own in errors.values() for error in own.values())
    wrong = (
        f"{told} a sequence of {'one token' if place == 1 else f'{place} tokens'}"
        for place, own in errors.items()
        for told, error in own.items()
        if error > case.limit
    )
    yield explained("cut anywhere = forward", worst, case.limit, wrong)


def _cuts(case: Case) -> list[int]:
    """Numbers of tokens after which the sequence is cut."""
    near = {border + i for border in accumulate(case.chunks) for i in (-1, 0, 1)}
    return sorted((near | {*range(FIRST + 1)}) & {*range(1, case.x.shape[1])})


def _cut_errors(case: Case, whole: Tensor, place: int) -> dict[str, float]:
    """What is wrong if a sequence is cut once, by how much: the causes before the effects."""
    head, rest = case.x[:, :place], case.x[:, place:]
    y_head, state = case.layer.forward_chunk(head, case.init())
    y_chunk, _ = case.layer.forward_chunk(rest, state)
    y_step, _ = case.layer.step(rest[:, 0], state)
    return {
        "forward is wrong for": relative(case.layer(head), whole[:, :place]),
        "forward_chunk is wrong for": relative(y_head, whole[:, :place]),
        "forward_chunk does not go on after": relative(y_chunk, whole[:, place:]),
        "step does not go on after": relative(y_step, whole[:, place]),
    }


@torch.no_grad()
def _unused(case: Case, verb: str) -> Iterator[str]:
    """The output depends on the state, if the output of forward depends on earlier inputs."""
    head, call, start = case.chunks[0], case.verbs()[verb], case.init()
    x = case.x.clone()
    x[:, :head] = case.example(case.x.shape[0], head)
    if relative(case.layer(case.x)[:, head:], case.layer(x)[:, head:]) > case.limit:
        first, second = (case.layer.forward_chunk(own[:, :head], start)[1] for own in (case.x, x))
        if not differing(start, call(case.x, start)[1], case.limit):
            yield f"{verb} returns its state as it was: nothing is carried on"
        if not differing(first, second, case.limit):
            yield "forward_chunk returns a state that does not depend on its input"
        outputs = (call(case.x[:, head:], state)[0] for state in (first, second))
        if relative(*outputs) <= case.limit:
            yield f"{verb} ignores its state"
    yield from _retyped(case, verb)


def _retyped(case: Case, verb: str) -> Iterator[str]:
    """Tensors of the state that a method makes in another dtype."""
    call, start = case.verbs()[verb], case.init()
    for name, leaf in fields(start).items():
        if leaf.is_floating_point() and leaf.dtype != case.dtype:
            told = f"{leaf.dtype} in a layer of {case.dtype}"
            yield f"init_state makes {name} of the state {told}: give it the dtype of a weight"
    after = fields(call(case.x, start)[1])
    for name, leaf in fields(start).items():
        if after[name].dtype != leaf.dtype:
            told = f"{after[name].dtype}, but init_state makes it {leaf.dtype}"
            yield f"{verb} returns {name} of the state as {told}"


@torch.no_grad()
def _chunks(case: Case) -> Iterator[str]:
    x, head = case.x, case.chunks[0]
    whole = case.layer(x)
    once, wanted = case.layer.forward_chunk(x, case.init())
    if relative(once, whole) > case.limit:
        apart = by_position(once, whole) / (whole.abs().max() or 1.0)
        places = (~(apart <= case.limit)).nonzero()
        where = f"first at position {int(places[0])}" if len(places) else "though each is near"
        yield f"forward_chunk from an initial state is not forward, {where}"
    _, end = case.run(x, (head, x.shape[1] - head), case.init())
    wrong = differing(end, wanted, case.limit)
    state = f": {wrong} of two chunks is not that of one" if wrong else ""
    yield f"forward_chunk does not go on where the chunk before ended{state}"


@torch.no_grad()
def _steps(case: Case) -> Iterator[str]:
    _, begun = case.layer.forward_chunk(case.x, case.init())
    y, after = case.layer.step(case.x[:, 0], begun)
    y_chunk, after_chunk = case.layer.forward_chunk(case.x[:, :1], begun)
    if relative(y, y_chunk[:, 0]) > case.limit:
        yield "step returns another output than forward_chunk of one token"
    if wrong := differing(after, after_chunk, case.limit):
        yield f"step returns another state than forward_chunk of one token: {wrong}"


def donated_steps_agree(case: Case) -> Iterator[Finding]:
    """Steps in place agree."""
    head, rest = case.chunks[0], case.x.shape[1] - case.chunks[0]
    x_head, x_rest = case.x.split([head, rest], dim=1)
    with torch.no_grad():
        _, state = case.layer.forward_chunk(x_head, case.init(capacity=rest))
        donated = copied(state)
        y = case.by_steps_in_place(x_rest, donated)
        wanted, after = case.by_steps(x_rest, state)
        same = not differing(state, donated, case.limit)
        following, _ = case.layer.step(case.x[:, 0], donated)
        wanted_following, _ = case.layer.step(case.x[:, 0], after)

    def differences() -> Iterator[str]:
        if relative(y[:, 0], wanted[:, 0]) > case.limit:
            yield "step_ returns another output than step"
        yield f"step_ leaves {'its state as it was' if same else 'another state than step'}"

    error = max(relative(y, wanted), relative(following, wanted_following))
    yield explained("step_ = step", error, case.limit, differences())

    twin = replace(case, layer=copy.deepcopy(case.layer))  # a state may be the layer's own memory
    with torch.no_grad():
        state = twin.init(capacity=case.x.shape[1])
        before = copied(state)
        twin.by_steps_in_place(case.x, state)
        again = twin.init(capacity=case.x.shape[1])
        shared = differing(before, again, case.limit)
        error = relative(twin.by_steps_in_place(case.x, again), case.layer(case.x))
    told = [f"init_state returns the same memory every time: {shared}"] if shared else []
    causes = chain(told, _retyped(case, "step"))
    yield explained("every initial state is a fresh one", error, case.limit, causes)


def outputs_fit(case: Case) -> Iterator[Finding]:
    """Outputs have the shape and the dtype of the layer."""
    with torch.no_grad():
        note = next(_misfits(case), "")
    yield Finding("outputs have the right shape", float(bool(note)), 0.0, note)


def _misfits(case: Case) -> Iterator[str]:
    """In words: the errors of methods, and results that are no output of the layer."""
    for name, leaf in fields(case.init()).items():
        if isinstance(leaf, Tensor) and leaf.shape[:1] != case.x.shape[:1]:
            told = f"no row for each of {len(case.x)} sequences: {[*leaf.shape]}"
            yield f"{name} of the state has {told}"
    for x in (case.x, case.x[:1], case.x[:, :1]):  # a squeeze drops an axis of one row or token
        yield from _misfits_of(case, x)


def _misfits_of(case: Case, x: Tensor) -> Iterator[str]:
    layer, state = case.layer, case.init(len(x), capacity=1)
    if shared := _overlapping(state):
        yield f"rows of the state that init_state makes share memory, clone them: {shared}"
    calls: dict[str, Callable[[], Any]] = {
        "forward_chunk": lambda: layer.forward_chunk(x, state),
        "step": lambda: layer.step(x[:, 0], state),
        "forward": lambda: (layer(x), ()),
        "step_": lambda: (layer.step_(x[:, 0], copied(state)), ()),
    }
    dtype = x.dtype if x.is_floating_point() else case.dtype
    for verb, call in calls.items():
        try:
            result = call()
        except Exception as error:
            yield f"{verb} raises {one_line(error)}"
            continue
        if not isinstance(result, tuple) or len(result) != 2:
            yield f"{verb} returns {shown(result)}, not a pair of an output and a state"
            continue
        if shared := _overlapping(result[1]):
            yield f"rows of the state that {verb} returns share memory, clone them: {shared}"
        y, axes = result[0], x.shape[: 1 if verb.startswith("step") else 2]
        shape = (*axes, layer.d_output) if layer.takes_vectors else (*axes, *y.shape[len(axes) :])
        if tuple(y.shape) != shape or y.dtype != dtype:
            yield f"{verb} returns {shown(y)}, not {dtype} of shape {shape}"
        elif not y.isfinite().all():
            yield f"{verb} returns numbers that are not finite"


def _overlapping(state: Any) -> str:
    """Names of tensors whose entries share memory, as those of ``expand`` do."""
    return ", ".join(
        name
        for name, leaf in fields(state).items()
        if isinstance(leaf, Tensor) and torch._debug_has_internal_overlap(leaf) == 1
    )


def training_agrees(case: Case) -> Iterator[Finding]:
    """Training computes the same, apart from random numbers."""
    errors = {verb: _change_by_training(case, verb) for verb in ("forward", "forward_chunk")}
    wrong = (verb for verb, error in errors.items() if error > case.limit)
    told = (f"{verb} computes another function in training mode, without dropout" for verb in wrong)
    yield explained("training = evaluation", max(errors.values()), case.limit, told)


@torch.no_grad()
def _change_by_training(case: Case, verb: str) -> float:
    """How training mode changes an output; zero if it draws random numbers, as dropout does."""
    twins = [copy.deepcopy(case.layer).train() for _ in range(2)]
    outputs = []
    for layer in (*twins, twins[0]):  # again in evaluation: a call may change the layer's buffers
        chunk = verb == "forward_chunk"
        state = layer.init_state(len(case.x))
        outputs.append(layer.forward_chunk(case.x, state)[0] if chunk else layer(case.x))
        layer.eval()
    first, second, evaluated = outputs
    return 0.0 if relative(first, second) > case.limit else relative(first, evaluated)


def results_repeat(case: Case) -> Iterator[Finding]:
    """Results depend on the arguments alone."""
    with torch.no_grad():
        note = next(_other_causes(case), "")
    yield Finding("results depend on the arguments alone", float(bool(note)), 0.0, note)


def _other_causes(case: Case) -> Iterator[str]:
    x, state = case.x, case.warm()
    calls: dict[str, Callable[[AnyLayer], Any]] = {
        "init_state": lambda layer: layer.init_state(len(x)),
        "forward": lambda layer: layer(x),
        "forward_chunk": lambda layer: layer.forward_chunk(x, state),
        "step": lambda layer: layer.step(x[:, 0], state),
    }
    for verb, call in calls.items():
        first, second = (call(copy.deepcopy(case.layer)) for _ in range(2))
        if differing(first, second, case.limit):
            yield f"{verb} draws random numbers: two calls with one input return two results"
    for verb, run in case.verbs().items():
        state = case.warm()
        y, _ = run(x, state)
        run(case.example(*x.shape[:2]), case.warm())
        if relative(run(x, state)[0], y) > case.limit:
            yield f"{verb} remembers earlier calls: its state is not only in its arguments"


def rows_do_not_mix(case: Case) -> Iterator[Finding]:
    """Rows do not mix."""
    changed = case.x.clone()
    changed[0] = case.example(1, case.x.shape[1])[0]
    state = case.warm()
    turned, others = list(reversed(range(len(case.x)))), range(1, len(case.x))
    with torch.no_grad():
        y, after = case.layer.forward_chunk(case.x, state)
        y_changed, after_changed = case.layer.forward_chunk(changed, state)
        y_next, _ = case.layer.step(case.x[:, 0], after)
        y_next_changed, _ = case.layer.step(changed[:, 0], after_changed)
        y_turned, _ = case.layer.forward_chunk(case.x[turned], select_rows(state, turned))
        own, own_changed = (select_rows(state, others) for state in (after, after_changed))
        mixed = differing(own, own_changed, case.limit)
        errors = {
            "forward": relative(case.layer(changed)[1:], case.layer(case.x)[1:]),
            "forward_chunk": max(relative(y_changed[1:], y[1:]), relative(y_turned, y[turned])),
            "step": relative(y_next_changed[1:], y_next[1:]),
        }
    verbs = [verb for verb, error in errors.items() if error > case.limit]
    if verbs == ["step"] and mixed:
        note = f"forward_chunk mixes rows in its state: {mixed}"
    else:
        note = f"{verbs[0]} mixes rows: the outputs of a row depend on other rows" if verbs else ""
    yield Finding("rows do not mix", max(errors.values()), case.limit, note)


def many_rows_agree(case: Case) -> Iterator[Finding]:
    """Many rows agree with few."""
    few, many = range(len(case.x)), [row % len(case.x) for row in range(MANY_ROWS)]
    runs = {"forward": lambda x, state: (case.layer(x), state), **case.verbs()}
    with torch.no_grad():
        _, state = case.layer.forward_chunk(case.x, case.init())
        results = {
            verb: [run(case.x[rows], select_rows(state, rows))[0] for rows in (few, many)]
            for verb, run in runs.items()
        }
    errors = {verb: relative(y, wanted[many]) for verb, (wanted, y) in results.items()}
    wrong = (verb for verb, error in errors.items() if error > case.limit)
    told = (f"{verb} of {MANY_ROWS} rows is not that of {len(case.x)} rows" for verb in wrong)
    yield explained("many rows = few rows", max(errors.values()), case.limit, told)


def causality(case: Case) -> Iterator[Finding]:
    """No output depends on a later input."""
    clause = "no output sees a later input"
    forward, chunk = _leak(case, clause, "forward"), _leak(case, clause, "forward_chunk")
    yield chunk if forward.ok else forward
    training = replace(case, layer=copy.deepcopy(case.layer).train())
    yield _leak(training, f"{clause}, in training", "forward", "in training mode, ")


def _leak(case: Case, clause: str, verb: str, when: str = "") -> Finding:
    """The largest effect of an input on earlier outputs; random numbers are the same."""
    length = case.x.shape[1]
    row = case.x[:1]
    changed = row.repeat_interleave(length, dim=0)
    other = case.example(length, length)
    diagonal = torch.arange(length, device=row.device)
    changed[diagonal, diagonal] = other[diagonal, diagonal]  # row t differs at position t alone
    outputs = []
    for x in (row.expand_as(changed), changed):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = copy.deepcopy(case.layer)
            chunk = verb == "forward_chunk"
            outputs.append(twin.forward_chunk(x, twin.init_state(length))[0] if chunk else twin(x))
    before, after = outputs
    later = (diagonal[None, :] >= diagonal[:, None]).view(length, length, *[1] * (after.ndim - 2))
    difference = (after - before).abs().masked_fill(later, 0.0)
    worst = difference.reshape(length, length, -1).amax(dim=2)  # by changed input, and by output
    error = finite(worst.max() / (float(before.abs().max()) or 1.0))
    place, seen = divmod(int(worst.argmax()), length)
    told = f"{when}{verb} at position t sees x[t+{place - seen}] (t = {seen})"
    return explained(clause, error, case.limit, iter([told]))
