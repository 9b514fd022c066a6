"""The kernels of Triton against the definitions: on a GPU, or interpreted on the CPU.

The ordinary suite has no GPU. There, one test runs this file again in a process in which Triton's
interpreter is switched on.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.utils._pytree import tree_map

from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.ops import (
    DiagonalWeights,
    H3Weights,
    ScanSignals,
    containment,
    fft_conv,
    short_conv,
    short_conv_stepper,
    use_backend,
)
from stateline.ops.op import OPS
from tests.ops.flat import (
    diagonal_ssm,
    diagonal_ssm_chunk,
    diagonal_ssm_stepper,
    h3_core,
    h3_core_chunk,
    h3_core_stepper,
    selective_scan,
    selective_scan_step,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
HALVES = (torch.bfloat16, torch.float16)

kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu",
    reason="no CUDA device; under the interpreter, test_the_kernels_under_the_interpreter runs it",
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@needs_triton
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_under_the_interpreter(which: str) -> None:
    if Version(version("triton")) < Version("3.7"):
        pytest.skip("Triton's interpreter before 3.7 calls int() on arrays, which numpy refuses")
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, "-k", "not under_the_interpreter and not for_a_gpu", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@needs_triton
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_memory() -> None:
    """For an H200, without one: the largest sizes that ``can_use`` lets through."""
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    shared = json.loads(done.stdout)
    assert len(shared) == 20
    assert max(shared.values()) <= 227 * 1024


@kernels
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (h3_core_chunk, lambda: h3_case(19, 4)),
        (diagonal_ssm_chunk, lambda: ssm_case(19)),
        (fft_conv, lambda: [normal(2, 19, 2), normal(4, 19)]),
        (short_conv, lambda: [normal(2, 19, 2), normal(4, 3)]),
        (selective_scan, lambda: scan_case(19)),
    ],
)
def test_compiled_code_is_one_graph_with_the_same_results(
    function: Callable[..., Any], inputs: Callable[[], list[Tensor]]
) -> None:
    def triton(*given: Tensor, backend: str) -> Any:
        return function(*given, backend="triton")

    given = [t.to(DEVICE) for t in inputs()]
    compiled = torch.compile(triton, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(run(compiled, given, ""), run(triton, given, ""), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: whatever a kernel does not write is seen."""
    empty = torch.empty

    def nan(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", nan)


@pytest.fixture(autouse=True)
def backends_anew() -> None:
    for op in OPS.values():
        op.forget()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modes(channels: int, count: int, outputs: int) -> list[Tensor]:
    """log_a (stable, any frequency), b and c."""
    log_a = torch.stack([-normal(channels, count).exp() / 5, 2 * normal(channels, count)], dim=-1)
    return [log_a, normal(channels, count, 2, seed=1), normal(outputs, count, 2, seed=2)]


def ssm_case(
    length: int, channels: int = 2, count: int = 3, batch: Sequence[int] = (2,), readouts: int = 1
) -> list[Tensor]:
    u, state = normal(*batch, length, channels, seed=3), normal(*batch, channels, count, 2, seed=4)
    return [u, *modes(channels, count, readouts * channels), state]


def h3_case(length: int, taps: int, width: int = 2) -> list[Tensor]:
    signals = [normal(2, length, width, seed=seed) for seed in (5, 6, 7)]
    past, state = normal(2, taps - 1, width, seed=8), normal(2, 1, 1, width, 3, 2, seed=9)
    skip = normal(width, seed=10)
    return [*signals, normal(width, taps), *modes(width, 3, width), skip, past, state]


def scan_case(
    length: int, channels: int = 2, states: int = 2, batch: int = 2, groups: int = 1
) -> list[Tensor]:
    """Steps from 0.01 to 100: some states last, others are replaced at once."""
    u, dt = normal(batch, length, channels), normal(batch, length, channels, seed=1).mul(2).exp()
    a, state = -normal(channels, states, seed=2).exp(), normal(batch, channels, states, seed=5)
    b, c = (normal(batch, length, groups, states, seed=seed) for seed in (3, 4))
    return [u, dt, a, b, c, state]


STARTS = torch.arange(2 * 37).view(2, 37) % 16 < 2
"""Documents of one and of fifteen tokens, also at the end of a tile; the second row continues."""


def run(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    backend: str,
    starts: Tensor | None = None,
) -> list[Tensor]:
    """Outputs, then the gradients of a random projection of them, in float64 on the CPU."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    packed = {} if starts is None else {"starts": starts.to(leaves[0].device)}
    found = function(*leaves, backend=backend, **packed)
    outputs = found if isinstance(found, tuple) else (found,)
    projected = sum(
        (y.double().cpu() * normal(*y.shape, seed=index).bfloat16().double()).sum()
        for index, y in enumerate(outputs)
    )
    gradients = torch.autograd.grad(projected, leaves, allow_unused=True, materialize_grads=True)
    return [t.detach().double().cpu() for t in (*outputs, *gradients)]


def errors(found: list[Tensor], truth: list[Tensor], sizes: Sequence[float] = ()) -> list[float]:
    """Largest errors, relative to the largest entry; to ``sizes``, or 1, where that is smaller."""
    sizes = sizes or [1.0] * len(truth)
    return [
        float((a - b).abs().max() / b.abs().max().clamp(min=size))
        for a, b, size in zip(found, truth, sizes, strict=True)
        if a.numel()
    ]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return max(errors([x.double() for x in found], [x.double() for x in wanted])) <= 5e-6


def agree(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    halved: int,
    *,
    truth: str = "reference",
    dtypes: Sequence[torch.dtype] = (torch.float32, *HALVES),
    starts: Tensor | None = None,
) -> None:
    """In float32 5e-6 or what the definition loses; in half precision twice that, and 1e-5.

    A gradient that sums n terms of size one has the size sqrt(n). Its sum may be nearly zero by
    chance, but its rounding errors are not.
    """
    sums = [max(1.0, inputs[0].numel() / max(1, t.numel())) ** 0.5 for t in inputs]
    for dtype in dtypes:
        given = [t.to(dtype if i < halved else torch.float32) for i, t in enumerate(inputs)]
        wanted = run(function, [t.double() for t in given], truth, starts)
        sizes = [1.0] * (len(wanted) - len(sums)) + sums
        kernel = run(function, [t.to(DEVICE) for t in given], "triton", starts)
        found = errors(kernel, wanted, sizes)
        lost = errors(run(function, given, truth, starts), wanted, sizes)
        for index, (error, own) in enumerate(zip(found, lost, strict=True)):
            limit = max(5e-6, own) if dtype == torch.float32 else 2 * own + 1e-5
            assert error <= limit, f"tensor {index} in {dtype}: {error:.1e} > {limit:.1e}"


@kernels
@pytest.mark.gpu
class TestDiagonal:
    @pytest.mark.parametrize("length", [37])
    def test_a_chunk(self, length: int) -> None:
        agree(diagonal_ssm_chunk, ssm_case(length, channels=1), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [1, 2, 15, 17, 257, 545])
    def test_any_length(self, length: int) -> None:
        agree(diagonal_ssm_chunk, ssm_case(length, channels=1, batch=(1,)), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "sizes",
        [{"count": 17}, {"count": 64}, {"batch": ()}, {"batch": (2, 3)}, {"readouts": 2}],
    )
    def test_any_size(self, sizes: dict[str, Any]) -> None:
        agree(diagonal_ssm_chunk, ssm_case(19, **sizes), 1)
        agree(diagonal_ssm, ssm_case(19, **sizes)[:4], 1)

    @pytest.mark.parametrize(
        "cut", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 36))]
    )
    def test_two_chunks_are_the_whole(self, cut: int) -> None:
        u, *weights, state = (t.to(DEVICE) for t in ssm_case(37))
        head, middle = diagonal_ssm_chunk(u[:, :cut], *weights, state, backend="triton")
        tail, after = diagonal_ssm_chunk(u[:, cut:], *weights, middle, backend="triton")
        y, end = diagonal_ssm_chunk(u, *weights, state, backend="triton")
        assert close((torch.cat([head, tail], dim=1), after), (y, end))

    @pytest.mark.slow
    def test_one_transition_serves_all_channels(self) -> None:
        u, log_a, *others = (t.to(DEVICE) for t in ssm_case(13, channels=3))
        found = diagonal_ssm_chunk(u, log_a[:1], *others, backend="triton")
        shared = log_a[:1].expand_as(log_a)
        wanted = diagonal_ssm_chunk(u, shared, *others, backend="reference")
        assert close(found, wanted)

    @pytest.mark.slow  # the core of H3 has such documents, too
    def test_documents_begin_anew(self) -> None:
        inputs = ssm_case(37, channels=1, readouts=2)
        agree(diagonal_ssm_chunk, inputs, 1, starts=STARTS)

    @pytest.mark.slow
    @pytest.mark.parametrize(("length", "every"), [(1, 1), (16, 1), (300, 7), (545, 300)])
    def test_documents_of_any_length(self, length: int, every: int) -> None:
        starts = torch.arange(2 * length).view(2, length) % every == every // 2
        agree(diagonal_ssm_chunk, ssm_case(length, channels=1), 1, starts=starts)

    def test_steps_are_a_chunk(self) -> None:
        u, *weights, state = (t.to(DEVICE) for t in ssm_case(5, readouts=2))
        skip = normal(4, seed=11).to(DEVICE)
        y, after = diagonal_ssm_chunk(u, *weights, state, backend="reference")
        wide = torch.stack([state, state])[0].movedim(0, -1).contiguous().movedim(-1, 0)  # a view
        stepper = diagonal_ssm_stepper(*weights, skip, backend="triton")
        found = torch.stack([stepper(u_t, wide) for u_t in u.unbind(dim=1)], dim=1)
        assert close((found, wide), (y + skip * u.repeat(1, 1, 2), after))


@kernels
@pytest.mark.gpu
class TestH3:
    @pytest.mark.parametrize("taps", [17])
    def test_a_chunk(self, taps: int) -> None:
        agree(h3_core_chunk, h3_case(21, taps, width=1), 3)

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [1, 17, 300])
    @pytest.mark.parametrize("taps", [1, 2, 64])
    def test_any_size(self, length: int, taps: int) -> None:
        agree(h3_core_chunk, h3_case(length, taps, width=1), 3)

    @pytest.mark.parametrize(
        "taps", [17, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 64))]
    )
    def test_documents_begin_anew(self, taps: int) -> None:
        inputs = h3_case(37, taps, width=1)
        agree(h3_core_chunk, inputs, 3, starts=STARTS)

    @pytest.mark.slow
    @pytest.mark.parametrize("every", [7, 200])
    def test_documents_of_any_length(self, every: int) -> None:
        starts = torch.arange(2 * 300).view(2, 300) % every == every // 2
        agree(h3_core_chunk, h3_case(300, 40, width=1), 3, starts=starts)

    @pytest.mark.slow
    def test_from_zero_states(self) -> None:
        agree(h3_core, h3_case(19, 4)[:8], 3)

    def test_chunks_and_steps_are_the_whole(self) -> None:
        q, k, v, taps, *weights, past, state = (t.to(DEVICE) for t in h3_case(19, 4, width=3))
        whole = h3_core_chunk(q, k, v, taps, *weights, past, state, backend="reference")
        head = (t[:, :17] for t in (q, k, v))
        y, past, state = h3_core_chunk(*head, taps, *weights, past, state, backend="triton")
        stepper = h3_core_stepper(taps, *weights, backend="triton")
        past = past.contiguous()
        steps = [stepper(q[:, t], k[:, t], v[:, t], past, state) for t in (17, 18)]
        found = torch.cat([y, torch.stack(steps, dim=1)], dim=1), past, state
        assert close(found, whole)

    @pytest.mark.slow
    def test_parts_of_one_projection_are_not_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a layer gets from ``weight @ x.mT`` has adjacent times."""
        from stateline.ops.triton_common import launch

        q, k, v, *others = (t.to(DEVICE) for t in h3_case(19, 4))
        parts = torch.cat([q, k, v], dim=2).mT.contiguous().chunk(3, dim=1)
        assert [x.data_ptr() for x in launch.channels_first(*parts)] == [
            x.data_ptr() for x in parts
        ]
        found = h3_core_chunk(*(x.mT for x in parts), *others, backend="triton")
        wanted = h3_core_chunk(q, k, v, *others, backend="reference")
        assert close(found, wanted)


@kernels
@pytest.mark.gpu
class TestSelectiveScan:
    @pytest.fixture(params=["small tiles", pytest.param("", marks=pytest.mark.slow)], autouse=True)
    def tiles(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Small tiles of 16 tokens and one channel are several in a short sequence."""
        if request.param:
            monkeypatch.setattr(OPS["selective_scan"].module("triton")[0], "ENTRIES", 16)

    def test_a_chunk(self) -> None:
        agree(selective_scan, scan_case(18, batch=1), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [1, 16, 130])
    def test_any_length(self, length: int) -> None:
        agree(selective_scan, scan_case(length), 1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "sizes", [{"states": 17}, {"channels": 18}, {"channels": 6, "groups": 2}, {"states": 1}]
    )
    def test_any_size(self, sizes: dict[str, int]) -> None:
        agree(selective_scan, scan_case(19, batch=1, **sizes), 1)

    def test_documents_begin_anew(self) -> None:
        inputs = scan_case(18, batch=1)
        agree(selective_scan, inputs, 1, starts=STARTS[:1, :18])

    def test_two_chunks_and_a_step_are_the_whole(self) -> None:
        *signals, state = (t.to(DEVICE) for t in scan_case(20, batch=1))
        u, dt, a, b, c = signals
        wanted = selective_scan(*signals, state, backend="reference")
        outputs = []
        for part in (slice(0, 17), slice(17, 19)):
            given = u[:, part], dt[:, part], a, b[:, part], c[:, part]
            y, state = selective_scan(*given, state, backend="triton")
            outputs.append(y)
        last = u[:, 19], dt[:, 19], a, b[:, 19], c[:, 19]
        y, after = selective_scan_step(*last, state, backend="triton")
        half = state.half()  # a state may be kept in another dtype than it is computed in
        rounded, next_half = selective_scan_step(*last, half, backend="triton")
        assert close((torch.cat([*outputs, y[:, None]], dim=1), after), wanted)
        assert next_half.dtype == torch.float16
        torch.testing.assert_close(next_half.float(), after, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(rounded, y, rtol=2e-3, atol=2e-3)


@kernels
@pytest.mark.gpu
class TestConvolutions:
    @pytest.mark.parametrize(("length", "taps"), [(137, 150)])
    def test_by_fft(self, length: int, taps: int) -> None:
        agree(fft_conv, [normal(3, length, 1), normal(2, taps, seed=1) / 4], 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [1, 129, 1025])
    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_by_fft_of_any_size(self, length: int, batch: tuple[int, ...]) -> None:
        kernel = normal(2, length, seed=1) / length**0.5
        agree(fft_conv, [normal(*batch, length, 1), kernel], 1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("rows", "length", "taps", "filters"),
        [(3, 2100, 2100, 2), (1, 4098, 5, 1), (1, 5000, 5000, 1), (1, 8193, 8193, 1)],
    )
    def test_by_fft_with_one_level_more(
        self, rows: int, length: int, taps: int, filters: int
    ) -> None:
        """Of 8,192 or 16,384 points; three rows are two pairs, of which one is half."""
        kernel = normal(filters, taps, seed=1) / taps**0.5
        dtypes = (torch.float32, torch.bfloat16) if rows > 1 else (torch.float32,)
        given = [normal(rows, length, 1), kernel]
        agree(fft_conv, given, 1, truth="torch", dtypes=dtypes)

    @pytest.mark.parametrize(
        ("length", "taps"),
        [(90, 80), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((150, 150), (250, 30)))],
    )
    def test_by_fft_in_parts(self, monkeypatch: pytest.MonkeyPatch, length: int, taps: int) -> None:
        """More points than the largest transform has, which is made small here."""
        monkeypatch.setattr(OPS["fft_conv"].module("triton")[0], "MOST_POINTS", 144)
        given = [normal(1, length, 1), normal(1, taps, seed=1) / taps**0.5]
        agree(fft_conv, given, 1, truth="torch", dtypes=[torch.float32])

    @pytest.mark.parametrize("length", [129])
    def test_the_end_does_not_wrap_around_to_the_start(self, length: int) -> None:
        u = torch.zeros(1, length, 1)
        u[0, -1] = 1
        y = fft_conv(u.to(DEVICE), torch.ones(1, length).to(DEVICE), backend="triton")
        assert y[0, :-1].abs().max() < 1e-6

    @pytest.mark.parametrize("taps", [1, 4])
    @pytest.mark.parametrize("filters", [1, 3])
    @pytest.mark.slow
    def test_by_taps(self, taps: int, filters: int) -> None:
        agree(short_conv, [normal(2, 37, 3), normal(3 * filters, taps, seed=1)], 1)

    @pytest.mark.parametrize("filters", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_documents_begin_anew(self, filters: int) -> None:
        inputs = [normal(2, 37, 3), normal(3 * filters, 4, seed=1)]
        agree(short_conv, inputs, 1, starts=STARTS)

    @pytest.mark.slow
    def test_more_taps_than_inputs(self) -> None:
        agree(short_conv, [normal(2, 3, 2), normal(4, 7, seed=1)], 1)

    @pytest.mark.slow
    def test_by_taps_over_several_tiles(self) -> None:
        agree(short_conv, [normal(3, 70, 66), normal(132, 3, seed=1)], 1)

    @pytest.mark.parametrize("taps", [1, 4])
    def test_steps_by_taps(self, taps: int) -> None:
        u, kernel, past = (
            t.to(DEVICE) for t in (normal(2, 5, 3), normal(3, taps), normal(2, taps - 1, 3))
        )
        wanted = short_conv(u, kernel, past, backend="reference")
        stepper = short_conv_stepper(kernel.flip(-1).mT, backend="triton")
        found = torch.stack([stepper(u_t, past) for u_t in u.unbind(dim=1)], dim=1)
        assert close([found], [wanted])
        torch.testing.assert_close(past, u[:, 5 - (taps - 1) :] if taps > 1 else past)


def one_row(inputs: list[Tensor]) -> list[Tensor]:
    return [t[:1] if t.ndim > 2 and len(t) == 2 else t for t in inputs]


CONTAINED: dict[str, tuple[Callable[..., Any], list[Tensor], list[int]]] = {
    "fft_conv": (fft_conv, [normal(2, 34, 1), normal(1, 34)], [0]),
    "short_conv": (short_conv, [normal(1, 34, 1), normal(1, 3)], [0]),
    "selective_scan": (
        selective_scan,
        scan_case(34, channels=1, states=1, batch=1),
        [0, 1, 3, 4],
    ),
    "diagonal_ssm": (diagonal_ssm_chunk, ssm_case(34, channels=1, count=1, batch=(1,)), [0]),
    "h3_core": (h3_core_chunk, one_row(h3_case(34, 3, width=1)), [0, 1, 2]),
}
"""A function, its inputs, and which of these are signals."""


@kernels
@pytest.mark.gpu
@pytest.mark.parametrize(
    "op",
    [
        "fft_conv",
        *(pytest.param(op, marks=pytest.mark.slow) for op in CONTAINED if op != "fft_conv"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_not_finite_stays_in_its_document(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernels alone: on a GPU, nothing around them looks at the numbers."""
    monkeypatch.setattr(containment, "_is_finite", lambda _: True)
    if op == "selective_scan":
        monkeypatch.setattr(OPS[op].module("triton")[0], "ENTRIES", 16)
    function, inputs, signals = CONTAINED[op]
    place, begin, end = 19, 14, 23
    (rows, length), packed = inputs[0].shape[:2], {}
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[0, [3, begin, end]] = True
    if op == "fft_conv":
        begin, end = 0, length
    else:
        packed["starts"] = starts.to(DEVICE)
    earlier, others = torch.ones(2, rows, length, 1, dtype=torch.bool)
    earlier[0, place:end] = others[0, begin:end] = False

    def gradients(given: list[Tensor], of_outputs: Tensor) -> list[Tensor]:
        leaves = [t.to(DEVICE).requires_grad_() for t in given]
        y = function(*leaves, backend="triton", **packed)
        y = y[0] if isinstance(y, tuple) else y
        asked = [leaves[i] for i in signals]
        found = torch.autograd.grad(y, asked, of_outputs.to(DEVICE))
        return [t.detach().cpu() for t in (y, *found)]

    def same(found: list[Tensor], wanted: list[Tensor], *kept: Tensor) -> None:
        for own, x, y in zip(kept, found, wanted, strict=True):
            chosen = own[..., 0]
            torch.testing.assert_close(x[chosen], y[chosen], rtol=1e-4, atol=1e-5)

    of_outputs = normal(*gradients(inputs, torch.ones(rows, length, 1))[0].shape, seed=1)
    wanted = [(kept, gradients(inputs, of_outputs * kept)) for kept in (earlier, others)]
    for number, signal in enumerate(signals):
        spoilt = [t.clone() for t in inputs]
        spoilt[signal][0, place] = math.nan if number % 2 else math.inf
        for kept, right in wanted:
            found = gradients(spoilt, of_outputs * kept)
            same(found, right, earlier, *[kept] * len(signals))
        assert not found[0][0, place].isfinite().any()
    spoilt_gradient = of_outputs.clone()
    spoilt_gradient[0, place] = math.nan
    found = gradients(inputs, spoilt_gradient)
    same(found[1:], wanted[1][1][1:], *[others] * len(signals))


ALONE = [
    "gated_conv",
    "h3(d_state=2)",
    "hyena",
    "long_conv",
    "mamba(d_state=2)",
    "rg_lru(n_heads=1)",
    "s4d(d_state=2)",  # its op is the only one of diagonal_ssm, dss and gss, too
    "ladder(gated_conv)",
    "parallel(gated_conv)",
    "shared(gated_conv)",
    "staircase(gated_conv)",
    "state_passing(gated_conv)",
    "value_residual(gated_conv)",
]
"""Layers and wrappers whose ops all run on these kernels."""

BESIDE = [
    "block_state(n_heads=1)",
    "gated_delta_net(n_heads=1)",
    "kimi_delta_attention(n_heads=1)",
    "mamba2",
    "slstm(n_heads=1)",
]
"""Layers with other ops, too, which contain what is not finite on the CPU alone."""


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="their interpreter is on the CPU, as the other ops are")
@pytest.mark.parametrize("pattern", ALONE + BESIDE)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered")
def test_layers_keep_what_is_not_finite_in_its_document(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in two chunks: one document ends where the first does, another goes on in the second."""
    if pattern in ALONE:
        monkeypatch.setattr(containment, "_is_finite", lambda _: True)
    torch.manual_seed(0)
    layer = build_stack(ModelConfig(pattern, vocab_size=2, d_model=2)).eval()
    x, places = torch.randn(2, 9, 2), [4, 5]
    sizes = [6, 3] if "gated_conv" in pattern else [9]  # the interpreter is slow
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[[0, 0, 1, 1], [3, 6, 5, 8]] = True
    others, earlier = torch.ones(2, 2, 9, dtype=torch.bool)
    others[0, 3:6] = others[1, 5:8] = earlier[0, 4:6] = earlier[1, 5:8] = False
    of_outputs = normal(2, 9, 2, seed=1)

    def run(x: Tensor, of_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, outputs, state = x.clone().requires_grad_(), [], layer.init_state(2)
        for chunk, begins in zip(x.split(sizes, 1), starts.split(sizes, 1), strict=True):
            y, state = layer.forward_chunk(chunk, state, starts=begins)
            outputs.append(y)
        y = torch.cat(outputs, dim=1)
        return y.detach(), torch.autograd.grad(y, x, of_outputs)[0]

    def spoilt(x: Tensor) -> Tensor:
        x = x.clone()
        x[[0, 1], places] = torch.tensor([[math.inf], [math.nan]])
        return x

    def same(found: Tensor, wanted: Tensor, kept: Tensor) -> None:
        torch.testing.assert_close(found[kept], wanted[kept], rtol=1e-4, atol=1e-5)

    with use_backend("triton"):
        y, gradient = run(x, of_outputs * others[..., None])
        found, found_gradient = run(spoilt(x), of_outputs * others[..., None])
        _, of_spoilt = run(x, spoilt(of_outputs))
    same(found, y, earlier)
    assert not found[[0, 1], places].isfinite().all(dim=1).any()
    same(found_gradient, gradient, others)
    same(of_spoilt, gradient, others)


U, DT, A, B, C, STATE = scan_case(3, states=257)
MANY_STATES = ScanSignals(U, DT, B, C), A, STATE
WIDE = torch.ones(1, 3, 2), DiagonalWeights(*modes(2, 65, 2)), None
HEADS = (
    *h3_case(3, 2)[:3],
    H3Weights(torch.ones(2, 2), DiagonalWeights(*modes(1, 3, 2)), torch.ones(2)),
    None,
)


@kernels
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "inputs", "reason"),
    [
        ("fft_conv", (torch.ones(1, 3, 1).double(), torch.ones(1, 2)), "float64"),
        ("fft_conv", (torch.ones(0, 3, 1), torch.ones(1, 2)), "empty"),
        ("short_conv", (torch.ones(1, 3, 1), torch.ones(1, 17)), "up to 16 taps"),
        ("diagonal_ssm", WIDE, "up to 64 modes"),
        ("selective_scan", MANY_STATES, "up to 256 states"),
        ("h3_core", HEADS, "heads of one channel"),
    ],
)
def test_what_they_cannot_run_is_left_to_others(
    op: str, inputs: Sequence[Any], reason: str
) -> None:
    placed = tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, tuple(inputs))
    assert reason in OPS[op].reasons(op, *placed)["triton"]
