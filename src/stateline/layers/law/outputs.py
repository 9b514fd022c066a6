"""Clauses about outputs: all ways to run a layer agree, and nothing sees what it must not see."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from stateline.errors import one_line
from stateline.layers.law.case import Case, relative
from stateline.layers.law.report import Finding
from stateline.layers.state import copied, select_rows, shown


def outputs_agree(case: Case) -> Iterator[Finding]:
    """Outputs agree."""
    with torch.no_grad():
        whole = case.layer(case.x)
        chunked, _ = case.run(case.x, case.chunks, case.init())
        stepped, _ = case.by_steps(case.x, case.init())
    yield Finding("chunks = forward", relative(chunked, whole), case.limit)
    yield Finding("steps = forward", relative(stepped, whole), case.limit)


def donated_steps_agree(case: Case) -> Iterator[Finding]:
    """Steps in place agree."""
    head, rest = case.chunks[0], case.x.shape[1] - case.chunks[0]
    x_head, x_rest = case.x.split([head, rest], dim=1)
    with torch.no_grad():
        _, state = case.layer.forward_chunk(x_head, case.init(capacity=rest))
        donated = copied(state)
        y = case.by_steps_in_place(x_rest, donated)
        wanted, after = case.by_steps(x_rest, state)
        following, _ = case.layer.step(case.x[:, 0], donated)
        wanted_following, _ = case.layer.step(case.x[:, 0], after)
    error = max(relative(y, wanted), relative(following, wanted_following))
    yield Finding("step_ = step", error, case.limit)

    twin = replace(case, layer=copy.deepcopy(case.layer))  # a state may be the layer's own memory
    with torch.no_grad():
        whole = case.layer(case.x)
        for _ in range(2):
            y = twin.by_steps_in_place(case.x, twin.init(capacity=case.x.shape[1]))
    yield Finding("every initial state is a fresh one", relative(y, whole), case.limit)


def outputs_fit(case: Case) -> Iterator[Finding]:
    """Outputs have the shape and the dtype of the layer."""
    with torch.no_grad():
        note = next(misfits(case), "")
    yield Finding("outputs have the right shape", float(bool(note)), 0.0, note)


def misfits(case: Case) -> Iterator[str]:
    """In words: the errors of methods, and results that are no output of the layer."""
    layer, x, state = case.layer, case.x, case.init(capacity=1)
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
        y, axes = result[0], x.shape[: 1 if verb.startswith("step") else 2]
        shape = (*axes, layer.d_output) if layer.takes_vectors else (*axes, *y.shape[len(axes) :])
        if tuple(y.shape) != shape or y.dtype != dtype:
            yield f"{verb} returns {shown(y)}, not {dtype} of shape {shape}"
        elif not y.isfinite().all():
            yield f"{verb} returns numbers that are not finite"


def causality(case: Case) -> Iterator[Finding]:
    """No output depends on a later input."""
    yield _leak(case, training=False)
    yield _leak(case, training=True)


def _leak(case: Case, training: bool) -> Finding:
    """The effect of each input on earlier outputs; random numbers of training are the same."""
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
            outputs.append(copy.deepcopy(case.layer).train(training)(x))
    before, after = outputs
    later = (diagonal[None, :] >= diagonal[:, None]).view(length, length, *[1] * (after.ndim - 2))
    difference = (after - before).abs().masked_fill(later, 0.0)
    worst = difference.flatten(1).amax(dim=1)
    error = float(worst.max()) / (float(before.abs().max()) or 1.0)
    late = f"the input at position {int(worst.argmax())} changes earlier outputs"
    note = "" if error <= case.limit else late
    clause = "no output sees a later input" + (", in training" if training else "")
    return Finding(clause, error, case.limit, note)


def rows_do_not_mix(case: Case) -> Iterator[Finding]:
    """Rows do not mix."""
    changed = case.x.clone()
    changed[0] = case.example(1, case.x.shape[1])[0]
    state = case.warm()
    turned = list(reversed(range(case.x.shape[0])))
    with torch.no_grad():
        error = relative(case.layer(changed)[1:], case.layer(case.x)[1:])
        y, after = case.layer.forward_chunk(case.x, state)
        y_changed, after_changed = case.layer.forward_chunk(changed, state)
        error = max(error, relative(y_changed[1:], y[1:]))
        y_next, _ = case.layer.step(case.x[:, 0], after)
        y_next_changed, _ = case.layer.step(changed[:, 0], after_changed)
        error = max(error, relative(y_next_changed[1:], y_next[1:]))
        y_turned, _ = case.layer.forward_chunk(case.x[turned], select_rows(state, turned))
        error = max(error, relative(y_turned, y[turned]))
    yield Finding("rows do not mix", error, case.limit)
