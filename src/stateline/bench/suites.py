"""The suites of ``stateline bench``: each times its candidates in turns and yields figures."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateline.bench.cases import OP_CASES, Case, Sizes
from stateline.bench.memory import peak_bytes
from stateline.bench.peaks import Peaks
from stateline.bench.record import Figure, Skipped
from stateline.bench.timing import Call, Timing, interleave, waiter
from stateline.errors import InputError
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.factory import AnyModel, make_model
from stateline.ops import use_backend
from stateline.tasks import make_task
from stateline.train.config import TrainConfig
from stateline.train.optimizer import make_optimizer

MOST_SECONDS = 20.0
"""A call that is predicted to take longer is left out."""

LONGEST_CHECKED = 8192
"""Positions up to which errors against float64 are measured."""

FORWARD, BOTH = "forward", "forward+backward"


@dataclass
class Settings:
    """What all suites share.

    Attributes:
        device: Where everything computes.
        dtype: Of inputs and weights.
        lengths: Positions of a row.
        tokens: Positions of a batch, as far as the length allows.
        d_model: Channels.
        seconds: Time to spend on each candidate.
        backends: Backends to compare.
        peaks: Ceilings of the machine.
        peers: Modules of other projects, by case: ``{case: {name: build(d_model)}}``.
        skipped: Filled with what could not be measured.
    """

    device: torch.device
    dtype: torch.dtype
    lengths: Sequence[int]
    tokens: int
    d_model: int
    seconds: float
    backends: Sequence[str]
    peaks: Peaks
    peers: Mapping[str, Mapping[str, Callable[[int], nn.Module]]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def sizes(self, length: int) -> Sizes:
        """Sizes of a case at one length."""
        return Sizes(max(1, self.tokens // length), length, self.d_model, self.device, self.dtype)


def bench_ops(settings: Settings, names: Sequence[str]) -> Iterator[Figure]:
    """Every op by itself: forward, and forward with backward, by length and backend."""
    for name in names:
        known: dict[tuple[str, str], tuple[float, float]] = {}
        for length in settings.lengths:
            sizes = settings.sizes(length)
            case = OP_CASES[name](sizes)
            for work in (FORWARD, BOTH):
                calls, first = {}, {}
                for backend in settings.backends:
                    reason = _too_slow(known.get((backend, work)), case.flops)
                    call = _op_call(case, backend, work)
                    if not reason:
                        reason, first[backend] = _first(call, settings.device)
                    if reason:
                        skip(settings, name, backend, work, length, reason)
                    else:
                        calls[backend] = call
                timed = interleave(calls, seconds=settings.seconds, device=settings.device)
                for backend, timing in timed.items():
                    known[backend, work] = timing.median, case.flops
                    yield figure(
                        name,
                        backend,
                        work,
                        sizes,
                        dataclasses.replace(timing, first=first[backend]),
                        n_bytes=peak_bytes(calls[backend], settings.device),
                        floor=settings.peaks.floor(case.n_bytes, case.flops),
                        error=_error(case, backend, work),
                    )


def bench_layers(settings: Settings, patterns: Sequence[str]) -> Iterator[Figure]:
    """Single layers, without norm and feed-forward, by length and backend, beside peers."""
    for pattern in patterns:
        ours = _bare_layer(pattern, settings)
        peers = {
            name: build(settings.d_model).to(settings.device, settings.dtype)
            for name, build in settings.peers.get(pattern, {}).items()
        }
        for length in settings.lengths:
            sizes = settings.sizes(length)
            for work in (FORWARD, BOTH):
                calls = {b: _layer_call(ours, sizes, work, b) for b in settings.backends}
                calls |= {n: _layer_call(peer, sizes, work, None) for n, peer in peers.items()}
                timed = interleave(calls, seconds=settings.seconds, device=settings.device)
                for name, timing in timed.items():
                    memory = peak_bytes(calls[name], settings.device)
                    yield figure(pattern, name, work, sizes, timing, n_bytes=memory)


def bench_train(
    settings: Settings, patterns: Sequence[str], tasks: Sequence[str]
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
                for b in settings.backends
            }
            timed = interleave(calls, seconds=settings.seconds, device=settings.device)
            for backend, timing in timed.items():
                yield figure(f"{pattern} on {spec}", backend, "update", sizes, timing)


def build_model(config: ModelConfig, settings: Settings) -> Any:
    """A model with the same initial weights each time."""
    torch.manual_seed(0)
    return make_model(config).to(settings.device, settings.dtype)


def _bare_layer(pattern: str, settings: Settings) -> nn.Module:
    config = ModelConfig(pattern, vocab_size=1, d_model=settings.d_model, block="plain")
    layer = build_stack(dataclasses.replace(config, feed_forward="none"))
    return layer.to(settings.device, settings.dtype)


def _op_call(case: Case, backend: str, work: str) -> Call:
    if work == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return case.run(*case.inputs, backend=backend)

        return forward

    def both() -> Tensor:
        y = case.run(*case.inputs, backend=backend)
        y.backward(torch.ones_like(y))
        return y

    return _clearing(both, case.inputs)


def _layer_call(layer: nn.Module, sizes: Sizes, work: str, backend: str | None) -> Call:
    x = sizes.randn(sizes.batch, sizes.length, sizes.d_model).requires_grad_()

    def preferring() -> AbstractContextManager[object]:
        return use_backend(backend) if backend else nullcontext()

    if work == FORWARD:

        def forward() -> object:
            with torch.no_grad(), preferring():
                return layer(x)

        return forward

    def both() -> object:
        with preferring():
            y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(torch.ones_like(y))
        return y

    return _clearing(both, (x, *layer.parameters()))


def _update(model: AnyModel, tokens: Tensor, targets: Tensor, backend: str) -> Call:
    optimizer = make_optimizer(model, TrainConfig())
    model.train()

    def update() -> None:
        optimizer.zero_grad()
        with use_backend(backend):
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def _clearing(call: Call, leaves: Sequence[Tensor]) -> Call:
    """The call, with gradients of the call before it dropped first."""

    def run() -> object:
        for leaf in leaves:
            leaf.grad = None
        return call()

    return run


def _too_slow(known: tuple[float, float] | None, flops: float) -> str:
    """Why a call is left out, by the time that the same candidate took at a smaller size."""
    if known is None:
        return ""
    predicted = known[0] * flops / known[1]
    return f"predicted to take {predicted:.0f} s" if predicted > MOST_SECONDS else ""


def _first(call: Call, device: torch.device) -> tuple[str, float]:
    """Why a backend cannot run a call, or the seconds of this first call."""
    wait = waiter(device)
    started = time.perf_counter()
    try:
        call()
    except InputError as error:
        return str(error), 0.0
    wait()
    return "", time.perf_counter() - started


def skip(
    settings: Settings, case: str, candidate: str, work: str, length: int, reason: str
) -> None:
    """Record what could not be measured."""
    settings.skipped.append(
        Skipped(case=case, candidate=candidate, work=work, length=length, reason=reason)
    )


def _error(case: Case, backend: str, work: str) -> float | None:
    """Largest difference to float64, of the output or of any gradient; short sequences only."""
    if case.inputs[0].shape[1] > LONGEST_CHECKED or case.inputs[0].device.type != "cpu":
        return None
    found = _outcome(case, case.inputs, backend, work)
    exact = _outcome(case, [x.detach().double() for x in case.inputs], "torch", work)
    return max(
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(found, exact, strict=True)
    )


def _outcome(case: Case, inputs: Sequence[Tensor], backend: str, work: str) -> Sequence[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = case.run(*leaves, backend=backend)
    if work == FORWARD:
        return [y.detach()]
    generator = torch.Generator().manual_seed(0)  # the same cotangent for every backend
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def figure(
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
    """The record of one timing."""
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
