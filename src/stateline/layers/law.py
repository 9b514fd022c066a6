"""The law of sequence layers, as a check that anyone can run on a layer of their own."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.layers.base import LOW_PRECISION, AnyLayer
from stateline.layers.state import (
    State,
    accumulators,
    cat_states,
    load_state,
    nbytes,
    save_state,
    select_rows,
)

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative error max|a - b| / max|b| of a tensor, by dtype of the check."""

LOW_PRECISION_LIMIT = 0.1
"""The same for a bfloat16 run against float32: rounding, not another function."""


class Finding(NamedTuple):
    """How one clause of the law came out."""

    clause: str
    error: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the clause holds."""
        return self.error <= self.limit


@dataclass(frozen=True)
class LawReport:
    """How a layer came out; its text is a table."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every clause holds."""
        return all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.clause) for finding in self.findings)
        lines = [f"{self.name}: {'the law holds' if self.ok else 'THE LAW IS BROKEN'}"]
        for clause, error, limit, note in self.findings:
            verdict = "ok    " if error <= limit else "BROKEN"
            lines.append(
                f"  {verdict}  {clause:<{width}}  {error:8.1e} of {limit:.0e}  {note}".rstrip()
            )
        return "\n".join(lines)


def check_layer(
    layer: AnyLayer,
    *,
    batch_size: int = 2,
    chunks: Sequence[int] = (5, 1, 3, 4),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    name: str | None = None,
) -> LawReport:
    """Check everything that a sequence layer promises, on random input.

    Parallel = chunks = steps = ``step_``, in outputs and in gradients with respect to parameters,
    input and the incoming state; no parameter is cut off from its gradient; no output depends on a
    later input, at any position; rows do not mix; the given state is unchanged, and every initial
    state a fresh one; states of different ages joined give what each gives alone; saving and
    loading changes nothing; bfloat16 runs and keeps its accumulators; ``state_bytes`` is true, and
    a state holds not much more memory than that.

    Args:
        layer: The layer; it is copied, not changed.
        batch_size: Rows of the input; at least 2, so that mixed rows show.
        chunks: Lengths of the pieces that the sequence is cut into; at least two.
        dtype: Precision of the check: float64 (limit 1e-9) or float32 (limit 1e-4).
        seed: Of the random input.
        name: What to call the layer; by default its class.

    Returns:
        A table of findings: ``report.ok`` tells whether all hold, ``str(report)`` is for people.

    Example:
        >>> from stateline.layers import S4D
        >>> check_layer(S4D(4, d_state=4)).ok
        True
    """
    subject = copy.deepcopy(layer).to(dtype).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = _example(subject, batch_size, sum(chunks), dtype)
        case = _Case(subject, x, tuple(chunks), dtype)
        findings = [finding for clause in _CLAUSES for finding in _apply(clause, case)]
    return LawReport(name or type(layer).__name__, tuple(findings))


@dataclass
class _Case:
    """A layer, an input, and the way it is cut."""

    layer: AnyLayer
    x: Tensor
    chunks: tuple[int, ...]
    dtype: torch.dtype

    @property
    def limit(self) -> float:
        return LIMITS[self.dtype]

    def run(self, x: Tensor, chunks: Sequence[int], state: State) -> tuple[Tensor, State]:
        """Feed the pieces in order."""
        outputs = []
        for piece in x.split(list(chunks), dim=1):
            y, state = self.layer.forward_chunk(piece, state)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    def walk(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Feed one token after the other."""
        outputs = []
        for x_t in x.unbind(dim=1):
            y, state = self.layer.step(x_t, state)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state

    def walk_in_place(self, x: Tensor, state: State) -> Tensor:
        """Feed one token after the other to a donated state."""
        with torch.no_grad():
            return torch.stack([self.layer.step_(x_t, state) for x_t in x.unbind(dim=1)], dim=1)

    def init(self, batch_size: int | None = None, capacity: int = 0) -> State:
        return self.layer.init_state(batch_size or self.x.shape[0], capacity=capacity)

    def example(self, batch_size: int, length: int) -> Tensor:
        return _example(self.layer, batch_size, length, self.dtype)

    def warm(self) -> State:
        """State after the first piece of another sequence, so that nothing is zero."""
        other = self.example(self.x.shape[0], self.chunks[0])
        with torch.no_grad():
            return self.layer.forward_chunk(other, self.init())[1]


def _example(layer: AnyLayer, batch_size: int, length: int, dtype: torch.dtype) -> Tensor:
    x = layer.example_input(batch_size, length)
    return x.to(dtype) if x.is_floating_point() else x


def _apply(clause: Callable[[_Case], Iterator[Finding]], case: _Case) -> list[Finding]:
    """Findings of one clause; a layer that raises has broken it."""
    try:
        return list(clause(case))
    except Exception as error:
        title = (clause.__doc__ or "").rstrip(".")
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Finding(title, float("inf"), case.limit, note)]


def _outputs(case: _Case) -> Iterator[Finding]:
    """Outputs agree."""
    with torch.no_grad():
        whole = case.layer(case.x)
        chunked, _ = case.run(case.x, case.chunks, case.init())
        stepped, _ = case.walk(case.x, case.init())
    yield Finding("chunks = forward", _relative(chunked, whole), case.limit)
    yield Finding("steps = forward", _relative(stepped, whole), case.limit)


def _in_place(case: _Case) -> Iterator[Finding]:
    """Donated steps agree."""
    head, rest = case.chunks[0], case.x.shape[1] - case.chunks[0]
    x_head, x_rest = case.x.split([head, rest], dim=1)
    with torch.no_grad():
        _, state = case.layer.forward_chunk(x_head, case.init(capacity=rest))
        kept, donated = state, pytree.tree_map(torch.clone, state)
        y = case.walk_in_place(x_rest, donated)
        wanted, after = case.walk(x_rest, kept)
        following, _ = case.layer.step(case.x[:, 0], donated)
        wanted_following, _ = case.layer.step(case.x[:, 0], after)
    error = max(_relative(y, wanted), _relative(following, wanted_following))
    yield Finding("step_ = step", error, case.limit)

    twin = replace(case, layer=copy.deepcopy(case.layer))  # a state may be the layer's own memory
    with torch.no_grad():
        whole = case.layer(case.x)
        for _ in range(2):
            y = twin.walk_in_place(case.x, twin.init(capacity=case.x.shape[1]))
    yield Finding("every initial state is a fresh one", _relative(y, whole), case.limit)


def _gradients(case: _Case) -> Iterator[Finding]:
    """Gradients agree."""
    x = case.x.clone().requires_grad_(case.x.is_floating_point())
    weight = torch.randn_like(case.layer(case.x))
    whole = _grads(case, x, case.layer(x), weight, ())
    chunked = _grads(case, x, case.run(x, case.chunks, case.init())[0], weight, ())
    stepped = _grads(case, x, case.walk(x, case.init())[0], weight, ())
    yield _compare("gradients: chunks = forward", chunked, whole, case.limit)
    yield _compare("gradients: steps = forward", stepped, whole, case.limit)
    yield _reach(case, whole)

    leaves, spec = pytree.tree_flatten(case.warm())
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    state = pytree.tree_unflatten(leaves, spec)
    whole = _grads(case, x, case.layer.forward_chunk(x, state)[0], weight, leaves)
    chunked = _grads(case, x, case.run(x, case.chunks, state)[0], weight, leaves)
    stepped = _grads(case, x, case.walk(x, state)[0], weight, leaves)
    yield _compare("gradients from a state: chunks", chunked, whole, case.limit)
    yield _compare("gradients from a state: steps", stepped, whole, case.limit)


def _causality(case: _Case) -> Iterator[Finding]:
    """No output depends on a later input."""
    length = case.x.shape[1]
    row = case.x[:1]
    changed = row.repeat_interleave(length, dim=0)
    other = case.example(length, length)
    diagonal = torch.arange(length, device=row.device)
    changed[diagonal, diagonal] = other[diagonal, diagonal]  # row t differs at position t alone
    with torch.no_grad():
        before, after = case.layer(row), case.layer(changed)
    later = (diagonal[None, :] >= diagonal[:, None]).view(length, length, *[1] * (after.ndim - 2))
    difference = (after - before).abs().masked_fill(later, 0.0)
    worst = difference.flatten(1).amax(dim=1)
    error = float(worst.max() / before.abs().max())
    note = (
        "" if error <= case.limit else f"an input at position {int(worst.argmax())} shows earlier"
    )
    yield Finding("no output sees a later input", error, case.limit, note)


def _rows(case: _Case) -> Iterator[Finding]:
    """Rows do not mix."""
    changed = case.x.clone()
    changed[0] = case.example(1, case.x.shape[1])[0]
    state = case.warm()
    turned = list(reversed(range(case.x.shape[0])))
    with torch.no_grad():
        error = _relative(case.layer(changed)[1:], case.layer(case.x)[1:])
        y, after = case.layer.forward_chunk(case.x, state)
        y_changed, after_changed = case.layer.forward_chunk(changed, state)
        error = max(error, _relative(y_changed[1:], y[1:]))
        y_next, _ = case.layer.step(case.x[:, 0], after)
        y_next_changed, _ = case.layer.step(changed[:, 0], after_changed)
        error = max(error, _relative(y_next_changed[1:], y_next[1:]))
        y_turned, _ = case.layer.forward_chunk(case.x[turned], select_rows(state, turned))
        error = max(error, _relative(y_turned, y[turned]))
    yield Finding("rows do not mix", error, case.limit)


def _state_is_a_value(case: _Case) -> Iterator[Finding]:
    """The given state is unchanged."""
    state, x = case.warm(), case.x.clone()
    before = [t.clone() for t in pytree.tree_leaves(state)]
    with torch.no_grad():
        _, after_chunk = case.layer.forward_chunk(x, state)
        _, after_step = case.layer.step(x[:, 0], state)
        _, with_room = case.layer.forward_chunk(x, case.init(capacity=1))
        for after in (after_chunk, after_step):  # writing to a new state must not reach the old
            for leaf in pytree.tree_leaves(after):
                leaf.zero_()
        case.layer.step_(x[:, 0], with_room)
    same = all(map(torch.equal, before, pytree.tree_leaves(state))) and torch.equal(x, case.x)
    yield Finding("the given state is unchanged", 0.0 if same else 1.0, 0.0)


def _ages(case: _Case) -> Iterator[Finding]:
    """States of different ages join."""
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
        joined = cat_states([first, second, first])
        chunked, _ = case.layer.forward_chunk(x_all, joined)
        stepped, _ = case.walk(x_all, joined)
        donated = case.walk_in_place(x_all, select_rows(joined, rows))
    error = max(_relative(y, wanted) for y in (chunked, stepped, donated))
    yield Finding("states of different ages join", error, case.limit)


def _saving(case: _Case) -> Iterator[Finding]:
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
    yield Finding("a saved state loads", 0.0 if same else _relative(found, wanted), 0.0)
    same = torch.equal(reloaded, wanted)
    note = "" if same or not plain else f"neither parameter nor buffer: {', '.join(plain)}"
    yield Finding("a state_dict loads", 0.0 if same else _relative(reloaded, wanted), 0.0, note)


def _dtypes(case: _Case) -> Iterator[Finding]:
    """Precision is as promised."""
    low = copy.deepcopy(case.layer).bfloat16()
    full = copy.deepcopy(low).float()  # the same weights: it is the computation that is judged
    x = case.x.float().bfloat16() if case.x.is_floating_point() else case.x
    with torch.no_grad():
        exact = full(x.float() if x.is_floating_point() else x)
        state = low.init_state(x.shape[0], capacity=1)
        y_chunk, after = low.forward_chunk(x, state)
        y_step, after_step = low.step(x[:, 0], after)
        outputs = {"forward": low(x), "forward_chunk": y_chunk, "step": y_step}
        outputs["step_"] = low.step_(x[:, 0], after)
    note = "".join(
        f"{verb} returns {str(y.dtype)[6:]}; "
        for verb, y in outputs.items()
        if y.dtype != torch.bfloat16
    )
    for which, found in (("init_state", state), ("forward_chunk", after), ("step", after_step)):
        if [t.dtype for t in pytree.tree_leaves(found)] != [
            t.dtype for t in pytree.tree_leaves(state)
        ]:
            note += f"{which} changes a dtype in the state; "
        if low_names := _low_accumulators(found):
            note += f"{which} keeps {', '.join(low_names)} in half precision; "
    error = max(_relative(outputs["forward"], exact), _relative(y_chunk, exact))
    yield Finding(
        "bfloat16 runs, accumulators float32",
        float("inf") if note else error,
        LOW_PRECISION_LIMIT,
        note.removesuffix("; "),
    )


def _size(case: _Case) -> Iterator[Finding]:
    """``state_bytes`` is true, and the state no view of what a chunk has computed."""
    with torch.no_grad():
        state = case.run(case.x[:1], case.chunks, case.init(1))[1]
    told, found = case.layer.state_bytes(case.x.shape[1]), nbytes(state)
    note = "the state grows with the length" if case.layer.state_grows else "the state is bounded"
    note = note if told == found else f"told {told}, found {found} bytes"
    with torch.no_grad():
        state = case.run(case.x[:1], (case.x.shape[1],), case.init(1))[1]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in pytree.tree_leaves(state)}
    held, size = sum(s.nbytes() for s in storages.values()), nbytes(state)
    yield Finding("no chunk stays in memory", held - size, size / 2, f"{size} of {held} bytes used")
    yield Finding("state_bytes is true", abs(told - found), 0.0, note)


_CLAUSES = (
    _outputs,
    _in_place,
    _gradients,
    _causality,
    _rows,
    _state_is_a_value,
    _ages,
    _saving,
    _dtypes,
    _size,
)


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest entry."""
    scale = float(b.abs().max()) or 1.0
    return _finite((a.to(b.dtype) - b).abs().max() / scale)


def _finite(error: Tensor) -> float:
    """NaN is infinitely wrong."""
    return float("inf") if error.isnan() else float(error)


def _grads(
    case: _Case, x: Tensor, y: Tensor, weight: Tensor, leaves: Sequence[Tensor]
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


def _compare(
    clause: str, found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float
) -> Finding:
    """Worst of the tensors, each relative to its own largest entry.

    A tensor all of whose entries are tiny beside the largest gradient (the bias of attention's keys
    has the gradient zero) is judged on that scale, lowered by the root of the limit.
    """
    floor = limit**0.5 * max(float(t.abs().max()) for t in wanted.values())
    errors = {
        name: _finite((found[name] - t).abs().max() / max(float(t.abs().max()), floor, 1e-300))
        for name, t in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return Finding(clause, errors[worst], limit, "" if errors[worst] <= limit else worst)


def _reach(case: _Case, grads: dict[str, Tensor]) -> Finding:
    """A parameter without any gradient must not matter: else it is cut off on the way."""
    errors = {"": 0.0}
    with torch.no_grad():
        for name, grad in grads.items():
            if grad.any() or name == "the input":
                continue
            twin = copy.deepcopy(case.layer)
            parameter = twin.get_parameter(name)
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            errors[name] = _relative(twin(case.x), case.layer(case.x))
    worst = max(errors, key=lambda name: errors[name])
    return Finding("every parameter gets its gradient", errors[worst], case.limit, worst)


def _plain_tensors(layer: AnyLayer) -> dict[str, Tensor]:
    """Tensors that a layer keeps, but as neither parameter nor buffer, by name."""
    registered = ("_parameters", "_buffers", "_modules")
    return {
        f"{path}.{name}".removeprefix("."): leaf
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if name not in registered
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    }


def _low_accumulators(state: Any) -> list[str]:
    """Names of accumulators that are kept in half precision."""
    if isinstance(state, Tensor):
        return []
    names = [name for name in accumulators(state) if getattr(state, name).dtype in LOW_PRECISION]
    return names + [name for part in state for name in _low_accumulators(part)]
