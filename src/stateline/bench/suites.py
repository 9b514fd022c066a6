"""The suites of ``stateline bench``: each times its candidates in turns and yields figures."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stateline.bench.memory import peak_bytes
from stateline.bench.peaks import Peaks
from stateline.bench.peers import Build, BuildTrained, bare_layer, is_transformer, layer_of
from stateline.bench.record import Figure, Skipped
from stateline.bench.timing import Call, Timing, interleave, stopwatch
from stateline.layers import Stack
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model
from stateline.models.likelihood import token_losses
from stateline.ops import OPS, use_backend
from stateline.ops.op import Sizes
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer

CPU_BACKENDS = ("torch", "numba")

FORWARD, BOTH = "forward", "forward+backward"

MOST_COPIES = 8
"""Copies of the inputs that are used in turns on a GPU."""


@dataclass
class BenchSettings:
    """The settings of all suites.

    Attributes:
        device: Where everything computes.
        dtype: Of inputs and weights.
        lengths: Positions of a row.
        tokens: Positions of a batch; at least one row is used.
        d_model: Channels.
        seconds: Time to spend on each candidate.
        backends: Backends to compare; ``None`` means all backends of the device.
        peaks: Ceilings of the machine.
        peers: Modules of other projects: ``{our layer: {name: build(pattern, d_model)}}``.
        skipped: Filled with what could not be measured.
        rows: Rows of a batch at every length, in place of ``tokens``.
        state_dtype: Precision in which states are kept between steps; ``None`` means their own.
        clock: Measures seconds on a CPU; ``None`` means wall-clock time.
    """

    device: torch.device
    dtype: torch.dtype
    lengths: Sequence[int]
    tokens: int
    d_model: int
    seconds: float
    backends: Sequence[str] | None
    peaks: Peaks
    peers: Mapping[str, Mapping[str, Build]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    rows: int | None = None
    state_dtype: torch.dtype | None = None
    clock: Callable[[], float] | None = None

    def sizes(self, length: int) -> Sizes:
        """Sizes of a case at one length."""
        rows = self.rows or max(1, self.tokens // length)
        return Sizes(rows, length, self.d_model, self.device, self.dtype)

    def of_op(self, op: str) -> Sequence[str]:
        """Backends of an op to compare, PyTorch's first."""
        if self.backends is not None:
            return self.backends
        if self.device.type != "cuda":
            return [*(b for b in CPU_BACKENDS if b in OPS[op].backends), "auto"]
        return ["torch", *(b for b in OPS[op].backends if b not in (*CPU_BACKENDS, "reference"))]

    def timed(
        self, case: str, work: str, sizes: Sizes, calls: Mapping[str, Call], *, memory: bool = False
    ) -> Iterator[Figure]:
        """Time candidates in turns, without those that fail at their first call."""
        able, first = {}, {}
        for name, call in calls.items():
            reason, first[name] = first_call(call, self.device)
            if reason:
                self.skipped.append(Skipped(case, name, work, sizes.length, reason))
            else:
                able[name] = call
        found = interleave(
            able, seconds=self.seconds, device=self.device, first=first, clock=self.clock
        )
        for name, timing in found.items():
            n_bytes = peak_bytes(calls[name], self.device) if memory else None
            yield figure_of(case, name, work, sizes, timing, n_bytes=n_bytes)

    @property
    def of_models(self) -> Sequence[str]:
        """Backends to compare in whole layers and models."""
        return self.backends or ("torch", "auto")


def first_call(call: Call, device: torch.device) -> tuple[str, float]:
    """Why a candidate cannot run, or the seconds of its first call.

    Whatever fails costs this candidate alone: a device without enough memory, or a kernel that its
    compiler refuses.
    """
    try:
        return "", stopwatch(device)(call, 1)
    except torch.OutOfMemoryError:
        return "it needs more memory than the device has", 0.0
    except Exception as error:
        return next(iter(str(error).splitlines()), type(error).__name__), 0.0


def bench_layers(settings: BenchSettings, patterns: Sequence[str]) -> Iterator[Figure]:
    """Single layers without norm and feed-forward, and peers, by length and backend."""
    for pattern in patterns:
        ours, peers = layers_of(pattern, settings)
        for length in settings.lengths:
            sizes = settings.sizes(length)
            for work in (FORWARD, BOTH):
                calls = {b: _layer_call(ours, sizes, work, b) for b in settings.of_models}
                calls |= {n: _layer_call(peer, sizes, work, None) for n, peer in peers.items()}
                yield from settings.timed(pattern, work, sizes, calls, memory=True)


def bench_train(
    settings: BenchSettings,
    patterns: Sequence[str],
    tasks: Sequence[str],
    peers: Mapping[str, BuildTrained],
) -> Iterator[Figure]:
    """Whole updates of small language models: forward, backward, clipping, optimizer."""
    for spec in tasks:
        task = make_task(spec)
        tokens, targets = (part.to(settings.device) for part in task.train_batch(0)[:2])
        sizes = Sizes(len(tokens), tokens.shape[1], 1, settings.device, settings.dtype)
        for pattern in patterns:
            config = task.model_config(pattern, {"d_model": settings.d_model})
            calls = {
                b: _update(build_model(config, settings), tokens, targets, b)
                for b in settings.of_models
            }
            if is_transformer(pattern):
                for name, build in peers.items():
                    peer = build(config, tokens.shape[1]).to(settings.device, settings.dtype)
                    calls[name] = _update(peer, tokens, targets, "auto")
            yield from settings.timed(f"{pattern} on {spec}", "update", sizes, calls)


def build_model(config: ModelConfig, settings: BenchSettings) -> Any:
    """A model with the same initial weights each time."""
    torch.manual_seed(0)
    return make_model(config).to(settings.device, settings.dtype)


def layers_of(pattern: str, settings: BenchSettings) -> tuple[Stack, dict[str, nn.Module]]:
    """A layer of ours, and the layers of other projects."""
    peers = {}
    for name, build in settings.peers.get(layer_of(pattern), {}).items():
        if (layer := build(pattern, settings.d_model)) is not None:
            peers[name] = layer.to(settings.device, settings.dtype)
    return bare_layer(pattern, settings.d_model).to(settings.device, settings.dtype), peers


def _layer_call(layer: nn.Module, sizes: Sizes, work: str, backend: str | None) -> Call:
    def run(leaves: Sequence[Tensor]) -> Tensor:
        y = layer(*leaves)
        return y[0] if isinstance(y, tuple) else y

    x = sizes.signal(sizes.d_model).requires_grad_()
    call = call_of(run, (x,), work, layer.parameters())

    def on_backend() -> object:
        with use_backend(backend):
            return call()

    return on_backend


def _update(model: nn.Module, tokens: Tensor, targets: Tensor, backend: str) -> Call:
    optimizer = make_optimizer(model, TrainConfig())
    model.train()

    def update() -> None:
        optimizer.zero_grad()
        with use_backend(backend):
            token_losses(model(tokens), targets).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def call_of(
    run: Callable[[Sequence[Tensor]], Tensor],
    leaves: tuple[Tensor, ...],
    work: str,
    weights: Iterable[Tensor] = (),
) -> Call:
    """A forward pass, or both passes without the gradients of the call before.

    Copies of the inputs are used in turns.
    """
    copies = _copies(leaves)
    turns = itertools.cycle(copies)
    trained = [*itertools.chain(*copies), *weights]

    def forward() -> Tensor:
        with torch.no_grad():
            return run(next(turns))

    def both() -> Tensor:
        for leaf in trained:
            leaf.grad = None
        y = run(next(turns))
        y.backward(torch.ones_like(y))
        return y

    return forward if work == FORWARD else both


def _copies(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Copies of the inputs: on a GPU, together larger than its cache."""
    device = inputs[0].device
    if device.type != "cuda":
        return [inputs]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MOST_COPIES, 1 + -(-2 * cache // sum(x.nbytes for x in inputs)))
    others = (tuple(x.detach().clone().requires_grad_() for x in inputs) for _ in range(count - 1))
    return [inputs, *others]


def figure_of(
    case: str,
    candidate: str,
    work: str,
    sizes: Sizes,
    timing: Timing,
    *,
    n_bytes: int | None = None,
    floor: float | None = None,
    error: float | None = None,
) -> Figure:
    """One line of the record."""
    low, high = timing.spread
    return Figure(
        case=case,
        candidate=candidate,
        work=work,
        batch=sizes.batch,
        length=sizes.length,
        positions=sizes.positions,
        seconds=timing.median,
        low=low,
        high=high,
        first=timing.first,
        n_bytes=n_bytes,
        floor_share=None if floor is None or work != FORWARD else floor / timing.median,
        error=error,
    )
