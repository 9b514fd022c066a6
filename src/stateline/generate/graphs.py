"""Decoding steps as recorded graphs: one launch per token instead of one per kernel."""

from collections.abc import Callable
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Step = Callable[[Tensor, Any], Tensor]
"""``step(tokens, state)`` returns logits and changes the state in place."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""``record(call)`` returns a function that repeats the call on the same memory, and the output."""

MOST = 8
"""Largest number of graphs that are kept, each with the memory of its states: the latest used."""

TRIALS = 2
"""Steps in which a new graph is compared; the state needs room for all of them."""

CLOSE = 1e-2
"""Largest difference of logits between a graph and the step, relative to the largest logit."""

log = getLogger("stateline.generate")


class _Graph(NamedTuple):
    """A recorded step and its memory."""

    replay: Callable[[], object]
    tokens: Tensor
    leaves: list[Tensor]
    logits: Tensor


class Graphs:
    """Replays a step, one graph for each size of a batch, see :func:`bucket`, and of the state.

    A graph is tied to its memory. A state in other memory is copied first: once after rows joined
    or left, or after the state grew. A batch with fewer rows than its graph repeats the last row. A
    new graph is compared with the step in :data:`TRIALS` steps on copies. If it differs, or if the
    step cannot be recorded, the session runs the step without graphs, and logs this once. If memory
    runs out, the other graphs leave, and steps of this size run without one.
    """

    def __init__(self, step: Step, record: Record | None = None) -> None:
        self.step, self.record = step, record or record_cuda
        self._graphs: dict[tuple[Any, ...], _Graph | None] = {}
        self._works = True

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of a copy, without graphs: it records its own."""
        return {**vars(self), "_graphs": {}}

    def clear(self) -> None:
        """Drop all graphs: they hold the addresses of the weights that were recorded."""
        self._graphs.clear()

    def __call__(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Logits of the next token, and the changed state, which may be in other memory.

        The logits are overwritten by the next step.
        """
        leaves, structure = pytree.tree_flatten(state)
        graph = self._find(tokens, leaves, structure) if self._works else None
        if graph is None:
            return self.step(tokens, state), state
        for held, leaf in zip(graph.leaves, leaves, strict=True):
            if held.data_ptr() != leaf.data_ptr():
                _fill(held, leaf)
        _fill(graph.tokens, tokens)
        graph.replay()
        rows = len(tokens)
        after = pytree.tree_unflatten([held[:rows] for held in graph.leaves], structure)
        return graph.logits[:rows], after

    def _find(self, tokens: Tensor, leaves: list[Tensor], structure: Any) -> _Graph | None:
        shapes = ((leaf.shape[1:], leaf.dtype) for leaf in (tokens, *leaves))
        key = (bucket(len(tokens)), *shapes)
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)  # the latest is the last
            return self._graphs[key]
        graph = None
        try:
            graph = self._make(tokens, leaves, structure)
            self._compare(graph, tokens, leaves, structure)
        except RuntimeError as error:
            self._works, graph = isinstance(error, torch.OutOfMemoryError), None
            self.clear()
            reason = " ".join(str(error).split())[:200]
            which = "steps of one size run" if self._works else "decoding runs"
            log.warning("%s without graphs, kernel by kernel: %s", which, reason)
        if len(self._graphs) == MOST:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = graph
        return graph

    def _make(self, tokens: Tensor, leaves: list[Tensor], structure: Any) -> _Graph:
        """Record the step on new buffers."""
        held, *buffers = map(_whole, (tokens, *leaves))
        state = pytree.tree_unflatten(buffers, structure)
        with torch.cuda.device_of(held):  # whose streams and generator are recorded
            replay, logits = self.record(lambda: self.step(held, state))
        return _Graph(replay, held, buffers, logits)

    def _compare(self, graph: _Graph, tokens: Tensor, leaves: list[Tensor], structure: Any) -> None:
        """Compare two steps: a value wrongly recorded as constant may differ only in the second.

        The step gets as many rows as the graph: with fewer, other kernels may run, whose rounding
        differs in half precision by more than :data:`CLOSE`.
        """
        for held, leaf in zip((graph.tokens, *graph.leaves), (tokens, *leaves), strict=True):
            _fill(held, leaf)
        copy = pytree.tree_unflatten([held.clone() for held in graph.leaves], structure)
        for _ in range(TRIALS):
            wanted = self.step(graph.tokens, copy)
            graph.replay()
            error = (graph.logits - wanted).abs().max()
            if not error <= CLOSE * wanted.abs().max():
                raise RuntimeError(f"a graph's logits differ by {float(error):.1e}")


def bucket(rows: int) -> int:
    """The number of rows that a graph has for a batch: 1, 2, 4, and then multiples of 8.

    Example:
        >>> [bucket(rows) for rows in (1, 3, 5, 8, 17)]
        [1, 4, 8, 8, 24]
    """
    return 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8


def _whole(rows: Tensor) -> Tensor:
    """A copy with as many rows as a graph has."""
    held = rows.new_empty(bucket(len(rows)), *rows.shape[1:])
    _fill(held, rows)
    return held


def _fill(held: Tensor, rows: Tensor) -> None:
    """Copy rows into a buffer of at least as many rows, and fill its end with the last row."""
    held[: len(rows)].copy_(rows)
    held[len(rows) :].copy_(rows[-1:])


def record_cuda(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Record a call as a CUDA graph, after a first call that compiles and allocates.

    If recording fails, PyTorch leaves the state of the device's generator unusable: the graph gets
    a copy of this state.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        with torch.cuda.graph(graph):
            logits = call()
    finally:
        generator.graphsafe_set_state(own)
    return graph.replay, logits
