"""Clauses about states: a value that can be joined, saved, and whose size is known."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import one_line
from stateline.layers.base import AnyLayer
from stateline.layers.law.case import Case, differing, relative
from stateline.layers.law.report import Finding, explained
from stateline.layers.state import (
    cat_states,
    copied,
    load_state,
    nbytes,
    save_state,
    select_rows,
)


def state_is_a_value(case: Case) -> Iterator[Finding]:
    """The given state is unchanged."""
    with torch.no_grad():
        note = next(_changes(case), "")
    yield Finding("the given state is unchanged", float(bool(note)), 0.0, note)


def _changes(case: Case) -> Iterator[str]:
    for verb, call in case.verbs().items():
        state, x = copied(case.warm()), case.x.clone()
        before = copied(state)
        _, after = call(x, state)
        if changed := differing(before, state):
            yield f"{verb} changes its input state: {changed}"
        if not torch.equal(x, case.x):
            yield f"{verb} changes its input"
        for leaf in pytree.tree_leaves(after):  # writing to a new state must not reach the old
            leaf.zero_()
        if shared := differing(before, state):
            yield f"the state that {verb} returns shares memory with its input: {shared}"
    _, with_room = case.layer.forward_chunk(case.x, case.init(capacity=1))
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "forward": case.layer,
        "step_": lambda x: case.layer.step_(x[:, 0], with_room),
    }
    for verb, run in others.items():
        x = case.x.clone()
        run(x)
        if not torch.equal(x, case.x):
            yield f"{verb} changes its input"


def ages_join(case: Case) -> Iterator[Finding]:
    """States of different lengths can be joined."""
    clause = "states of different lengths can be joined"
    young, rest = case.chunks[0], case.x.shape[1] - case.chunks[0]
    x_young, x_rest = case.x[:, :young], case.x[:, young:]
    rows = list(range(3 * case.x.shape[0]))
    x_all = torch.cat([x_rest] * 3)
    with torch.no_grad():
        _, first = case.layer.forward_chunk(x_young, case.init(capacity=rest))
        _, second = case.layer.forward_chunk(case.x, case.init(capacity=rest))
        wanted_first, _ = case.layer.forward_chunk(x_rest, first)
        wanted_second, _ = case.layer.forward_chunk(x_rest, second)
        wanted = torch.cat([wanted_first, wanted_second, wanted_first])
        try:
            joined = cat_states([first, second, first])
        except Exception as error:
            told = "states after different numbers of tokens cannot be joined (cat)"
            yield Finding(clause, float("inf"), case.limit, f"{told}: {one_line(error)}")
            return
        chunked, _ = case.layer.forward_chunk(x_all, joined)
        stepped, _ = case.by_steps(x_all, joined)
        donated = case.by_steps_in_place(x_all, select_rows(joined, rows))
    results = (chunked, stepped, donated)

    def causes() -> Iterator[str]:
        shorter, longer = (
            any(relative(y[own], wanted[own]) > case.limit for y in results)
            for own in (slice(len(case.x)), slice(len(case.x), 2 * len(case.x)))
        )
        if shorter and longer:
            yield "all rows come out wrong"
        else:
            told = "rows with different numbers of tokens are treated as equally long"
            yield f"{told}: the {'longer' if longer else 'shorter'} rows come out wrong"

    worst = max(relative(y, wanted) for y in results)
    yield explained(clause, worst, case.limit, causes())


def saving(case: Case) -> Iterator[Finding]:
    """Saving and loading changes nothing."""
    state = case.warm()
    twin = copy.deepcopy(case.layer)
    with torch.no_grad():
        wanted, _ = case.layer.forward_chunk(case.x, state)
        with tempfile.TemporaryDirectory() as folder:
            save_state(Path(folder) / "state", state, case.layer)
            loaded = load_state(Path(folder) / "state", case.layer)
        found, _ = case.layer.forward_chunk(case.x, loaded)
        plain = _plain_tensors(twin)
        for tensor in [*twin.parameters(), *plain.values()]:
            tensor.copy_(tensor + 1)
        twin.load_state_dict(case.layer.state_dict())
        reloaded, _ = twin.forward_chunk(case.x, state)
    same = torch.equal(found, wanted)
    note = "" if same else "a saved state does not load as it was"
    yield Finding("a saved state loads", 0.0 if same else relative(found, wanted), 0.0, note)
    same = torch.equal(reloaded, wanted)
    note = "" if same else "a state_dict does not hold the whole layer"
    note += f": neither parameter nor buffer: {', '.join(plain)}" if plain and not same else ""
    yield Finding("a state_dict loads", 0.0 if same else relative(reloaded, wanted), 0.0, note)


def size(case: Case) -> Iterator[Finding]:
    """``state_bytes`` is correct, and the state does not keep a whole chunk in memory."""
    with torch.no_grad():
        state = case.run(case.x[:1], case.chunks, case.init(1))[1]
    told, found = case.layer.state_bytes(case.x.shape[1]), nbytes(state)
    note = "the state grows with the length" if case.layer.state_grows else "the state is bounded"
    note = note if told == found else f"state_bytes is wrong: told {told}, found {found} bytes"
    with torch.no_grad():
        state = case.run(case.x[:1], (case.x.shape[1],), case.init(1))[1]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in pytree.tree_leaves(state)}
    held, size = sum(s.nbytes() for s in storages.values()), nbytes(state)
    used, unused = f"{size} of {held} bytes used", held - size
    kept = "the state keeps the memory of a whole chunk alive: " if unused > size / 2 else ""
    yield Finding("no chunk stays in memory", unused, size / 2, kept + used)
    yield Finding("state_bytes is true", abs(told - found), 0.0, note)


def _plain_tensors(layer: AnyLayer) -> dict[str, Tensor]:
    """Tensors that a layer keeps neither as parameters nor as buffers, by name."""
    registered = ("_parameters", "_buffers", "_modules")
    return {
        f"{path}.{name}".removeprefix("."): leaf
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if name not in registered
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    }
