"""The suite ``ops`` of ``stateline bench``: single ops, by length and backend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stateline import ops
from stateline.bench.memory import peak_bytes
from stateline.bench.record import Figure, Skipped
from stateline.bench.suites import BOTH, FORWARD, BenchSettings, call_of, figure_of, first_call
from stateline.bench.timing import interleave
from stateline.ops import OPS, use_backend
from stateline.ops.op import Sizes

MOST_SECONDS = 20.0
"""A call that is predicted to take longer is left out."""

_LEAF = object()
"""A placeholder for a leaf."""


@dataclass(frozen=True)
class Case:
    """The example of an op.

    Attributes:
        op: Name of the op.
        function: Name of its function.
        leaves: Floating-point tensors among the inputs, which require a gradient.
        flops: Arithmetic of the cheapest known algorithm.
    """

    op: str
    function: str
    leaves: tuple[Tensor, ...]
    flops: float
    _others: tuple[Any, ...]
    _structure: Any

    @classmethod
    def of(cls, op: str, sizes: Sizes) -> "Case":
        """The example of an op at these sizes."""
        example = OPS[op].example(sizes)
        values, structure = tree_flatten(example.inputs)
        leaves = tuple(x.requires_grad_() for x in values if _is_leaf(x))
        others = tuple(_LEAF if _is_leaf(x) else x for x in values)
        return cls(op, example.function or op, leaves, example.flops, others, structure)

    @property
    def n_bytes(self) -> float:
        """Traffic that no implementation can avoid: inputs read, output written."""
        return float(sum(x.nbytes for x in self.leaves) + self.leaves[0].nbytes)

    def inputs(self, leaves: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of the function, with these tensors."""
        each = iter(leaves)
        values = [next(each) if x is _LEAF else x for x in self._others]
        return tuple(tree_unflatten(values, self._structure))

    def run(self, leaves: Sequence[Tensor], backend: str) -> Tensor:
        """The output on a backend, which also computes the ops inside."""
        with use_backend(backend):
            found = getattr(ops, self.function)(*self.inputs(leaves), backend=backend)
        return found[0] if isinstance(found, tuple) else found


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def bench_ops(settings: BenchSettings, names: Sequence[str]) -> Iterator[Figure]:
    """Every op by itself: forward, and forward with backward, by length and backend."""
    for name in names:
        known: dict[tuple[str, str], tuple[float, float]] = {}
        for length in settings.lengths:
            sizes = settings.sizes(length)
            case = Case.of(name, sizes)
            for work in (FORWARD, BOTH):
                calls, first = {}, {}
                for backend in settings.of_op(name):
                    reason = _too_slow(known.get((backend, work)), case.flops)
                    call = call_of(partial(case.run, backend=backend), case.leaves, work)
                    if not reason:
                        reason, first[backend] = first_call(call, settings.device)
                    if reason:
                        settings.skipped.append(Skipped(name, backend, work, length, reason))
                    else:
                        calls[backend] = call
                timed = interleave(
                    calls,
                    seconds=settings.seconds,
                    device=settings.device,
                    first=first,
                    clock=settings.clock,
                )
                for backend, timing in timed.items():
                    known[backend, work] = timing.median, case.flops
                    yield figure_of(
                        name,
                        backend,
                        work,
                        sizes,
                        timing,
                        n_bytes=peak_bytes(calls[backend], settings.device),
                        floor=settings.peaks.floor(case.n_bytes, case.flops),
                        error=_error(case, backend, work, length),
                    )


def _too_slow(known: tuple[float, float] | None, flops: float) -> str:
    """Why a call is left out, by the time that the same candidate took at a smaller size."""
    if known is None:
        return ""
    predicted = known[0] * flops / known[1]
    return f"predicted to take {predicted:.0f} s" if predicted > MOST_SECONDS else ""


def _error(case: Case, backend: str, work: str, length: int) -> float | None:
    """Largest difference to float64, of the output or of any gradient; short sequences only."""
    on_cpu = case.leaves[0].device.type == "cpu"
    if length > (8192 if on_cpu else 2048):  # a GPU has larger batches: attention scores must fit
        return None
    found = _outcome(case, backend, work)
    wide = replace(case, leaves=tuple(x.detach().double() for x in case.leaves))
    exact = _outcome(wide, "torch", work)
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
        for a, b in zip(found, exact, strict=True)
    )


def _outcome(case: Case, backend: str, work: str) -> Sequence[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in case.leaves]
    y = case.run(leaves, backend)
    if work == FORWARD:
        return [y.detach()]
    generator = torch.Generator().manual_seed(0)  # the same cotangent for every backend
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
