"""What the numba kernels promise beyond what every backend does."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateline import ops
from stateline.errors import InputError
from stateline.layers.mixers.diagonal_ssm import DiagonalSSM
from stateline.ops import OPS
from stateline.ops.op import Sizes
from tests.ops import flat

pytest.importorskip("numba")

from stateline.ops.numba_common import launch

Inputs = list[Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def vectors(channels: int, modes: int, copies: int | None = None) -> Inputs:
    """log_a (stable), b and c."""
    copies = channels if copies is None else copies
    log_a = torch.stack([-normal(copies, modes).exp() / 5, 2 * normal(copies, modes)], dim=-1)
    return [log_a, normal(channels, modes, 2, seed=1), normal(channels, modes, 2, seed=2)]


def diagonal(batch: int, length: int, channels: int, modes: int) -> Inputs:
    state = normal(batch, channels, modes, 2)
    return [normal(batch, length, channels), *vectors(channels, modes), state]


def scan(batch: int, length: int, channels: int, d_state: int, groups: int = 1) -> Inputs:
    u, dt = normal(batch, length, channels), F.softplus(normal(batch, length, channels, seed=1))
    b, c = (normal(batch, length, groups, d_state, seed=seed) for seed in (2, 3))
    return [u, dt, -normal(channels, d_state).exp(), b, c, normal(batch, channels, d_state)]


def core(batch: int, length: int, channels: int, modes: int, taps: int = 5) -> Inputs:
    signals = (normal(batch, length, channels, seed=seed) for seed in (1, 2, 3))
    past, state = normal(batch, taps - 1, channels), normal(batch, 1, 1, channels, modes, 2)
    weights = normal(channels, taps) / taps
    return [*signals, weights, *vectors(channels, modes), normal(channels), past, state]


def convolution(batch: int, length: int, channels: int, taps: int) -> Inputs:
    return [normal(batch, length, channels), normal(channels, taps)]


def lookup(batch: int, length: int, heads: int, width: int) -> Inputs:
    q, k = (normal(batch, length, heads, width, seed=seed) for seed in (1, 2))
    v, state = normal(batch, length, heads, width + 2), normal(batch, heads, width, width + 2)
    return [q, k, v, -normal(batch, length, heads).exp() / 5, state]


def replacing(batch: int, length: int, heads: int, width: int) -> Inputs:
    q, k, v, log_decay, state = lookup(batch, length, heads, width)
    beta = normal(batch, length, heads, seed=1).sigmoid()
    return [q, F.normalize(k, dim=-1), v, log_decay, beta, state]


def correcting(batch: int, length: int, heads: int, width: int) -> Inputs:
    q, k, v, log_decay, beta, state = replacing(batch, length, heads, width)
    decays = log_decay[..., None] * normal(batch, length, heads, width, seed=3).sigmoid()
    written = normal(batch, length, heads, width, seed=4)
    return [q, written, v, decays, k, -beta[..., None] * k, state]


def gated(batch: int, length: int, heads: int, width: int) -> Inputs:
    f, b = normal(batch, length, heads, seed=1).tanh(), normal(batch, length, heads)
    return [f, b, normal(batch, heads)]


CASES: dict[str, tuple[str, Callable[..., Inputs], int]] = {
    "diagonal_ssm": ("diagonal_ssm", diagonal, 4),
    "diagonal_ssm_chunk": ("diagonal_ssm", diagonal, 5),
    "selective_scan": ("selective_scan", scan, 6),
    "short_conv": ("short_conv", convolution, 2),
    "linear_attention": ("linear_attention", lookup, 5),
    "linear_scan": ("linear_scan", gated, 3),
    "gated_delta_rule": ("gated_delta_rule", replacing, 6),
    "delta_rule": ("delta_rule", correcting, 7),
}
FUNCTIONS = list(CASES)
CHUNKED = [
    "diagonal_ssm_chunk",
    "selective_scan",
    "linear_attention",
    "linear_scan",
    "gated_delta_rule",
    "delta_rule",
]
STEPS = [
    "diagonal_ssm_step",
    "selective_scan_step",
    "h3_core_step",
    "linear_attention_step",
    "gated_delta_rule_step",
    "delta_rule_step",
]


def inputs_of(function: str, *sizes: int) -> Inputs:
    _, case, count = CASES[function]
    return case(*sizes)[:count]


def run(function: str, backend: str = "numba") -> Callable[..., Any]:
    return partial(getattr(flat, function, None) or getattr(ops, function), backend=backend)


def all_of(function: str, inputs: Inputs) -> list[Tensor]:
    """Outputs and gradients of the numba backend."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = run(function)(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)
    return [t.detach() for t in (*outputs, *gradients)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (9, 130, 33, 5), (2, 200, 70, 4), (3, 64, 16, 9), (9, 13, 33, 5)]
)
def test_any_size_is_the_definition(
    agrees: Callable[..., None], function: str, sizes: tuple[int, ...]
) -> None:
    agrees(run(function), run(function, "reference"), inputs_of(function, *sizes))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_documents_in_any_block_are_the_definition(
    agrees: Callable[..., None], function: str
) -> None:
    starts = torch.rand(3, 150, generator=torch.Generator().manual_seed(0)) < 0.05
    starts[1, 64:66] = starts[2, 0] = True
    runs = (run(function, backend) for backend in ("numba", "reference"))
    agrees(*runs, inputs_of(function, 3, 150, 33, 4), starts=starts)


@pytest.mark.parametrize("groups", [2, 5])
def test_groups_that_cross_the_lanes_are_the_definition(
    agrees: Callable[..., None], groups: int
) -> None:
    inputs = scan(2, 70, 90, 7, groups)
    agrees(run("selective_scan"), run("selective_scan", "reference"), inputs)


def test_taps_beyond_a_block_of_time_are_the_definition(agrees: Callable[..., None]) -> None:
    agrees(run("short_conv"), run("short_conv", "reference"), convolution(2, 300, 17, 200))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(function: str) -> None:
    leaves = [t.requires_grad_() for t in inputs_of(function, 2, 5, 3, 2)]
    assert torch.autograd.gradcheck(run(function), leaves)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_second_derivative_is_refused(function: str) -> None:
    leaves = [t.requires_grad_() for t in inputs_of(function, 1, 3, 2, 2)]
    y = run(function)(*leaves)
    y = y[0] if isinstance(y, tuple) else y
    gradient = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(InputError, match="first derivatives only"):
        gradient.sum().backward()


@pytest.mark.parametrize("cut", [1, 15, 63, 64, 65, 128, 149])
@pytest.mark.parametrize("function", CHUNKED)
def test_two_chunks_are_the_whole(function: str, cut: int) -> None:
    inputs = inputs_of(function, 2, 150, 18, 3)
    signals = [i for i, t in enumerate(inputs) if t.ndim > 2 and t.shape[1] == 150]
    head, tail = (
        [t[:, part] if i in signals else t for i, t in enumerate(inputs)]
        for part in (slice(cut), slice(cut, None))
    )
    y_head, *middle = run(function)(*head)
    y_tail, *after = run(function)(*tail[:-1], *middle)
    y, *wanted = run(function)(*inputs)
    for a, b in zip([torch.cat([y_head, y_tail], dim=1), *after], [y, *wanted], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def gains(function: str, *inputs: Any) -> bool:
    """What the kernels say of a call that they can run."""
    return OPS[function.removesuffix("_step_")].module("numba")[0].gains(function, *inputs)


def example(name: str, length: int) -> tuple[Any, ...]:
    return OPS[name].example(Sizes(1, length, 64, torch.device("cpu"))).inputs


@pytest.mark.parametrize(
    ("rows", "width", "wanted"), [(4, 512, True), (16, 64, True), (64, 64, False)]
)
def test_slstm_gains_in_few_rows_or_narrow_ones(rows: int, width: int, wanted: bool) -> None:
    gates = torch.zeros(rows, 1, 4, 4, width // 4)
    assert gains("slstm", gates, None, None) == wanted


@pytest.mark.parametrize(("widest", "wanted"), [(128, False), (math.inf, True)])
def test_gradients_of_wide_heads_go_elsewhere_unless_vectors_are_wide(
    monkeypatch: pytest.MonkeyPatch, widest: float, wanted: bool
) -> None:
    monkeypatch.setattr(OPS["gated_delta_rule"].module("numba")[0], "WIDEST", widest)
    *signals, state = (t.requires_grad_() for t in replacing(1, 2, 1, 128))
    inputs = ops.GatedDeltaSignals(*signals), state
    assert gains("gated_delta_rule", *inputs) == wanted
    with torch.no_grad():
        assert gains("gated_delta_rule", *inputs)


@pytest.mark.parametrize("lanes", [4, 8])
def test_vectors_of_sse_gain_only_in_long_sequences(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ("linear_attention", "diagonal_ssm"):
        monkeypatch.setattr(OPS[op].module("numba")[0], "LANES", lanes)
    for length in (16, 512, 2048):
        (signals,), (u, weights, _) = (
            example(op, length) for op in ("linear_attention", "diagonal_ssm")
        )
        leaves = signals._replace(v=signals.v.clone().requires_grad_())
        wide = lanes > 4
        assert gains("linear_attention", signals) == (length >= 512 or wide)
        assert gains("linear_attention", leaves) == (length >= 2048 or wide)
        assert gains("diagonal_ssm", u, weights) == (length >= 512 or wide)
        assert gains("diagonal_ssm", u.clone().requires_grad_(), weights) == (
            length >= 2048 or wide
        )
        assert gains("diagonal_ssm_step_", u, weights)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def test_rounding_does_not_add_up_over_long_sequences() -> None:
    """Every error is at most 1e-6 of the result, 2e-6 for the gradient of log_a."""
    torch.manual_seed(0)
    parameters = [t.detach() for t in DiagonalSSM(16).weights()]
    inputs = [torch.randn(1, 8192, 16), *parameters]
    found = all_of("diagonal_ssm", inputs)
    wanted = all_of("diagonal_ssm", [t.double() for t in inputs])
    errors = [relative(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(errors[:2] + errors[3:]) <= 1e-6
    assert errors[2] <= 2e-6


def test_shared_transitions_of_short_batches_are_the_definition(
    agrees: Callable[..., None],
) -> None:
    inputs = [normal(9, 13, 6), *vectors(6, 5, copies=1)]
    agrees(run("diagonal_ssm"), run("diagonal_ssm", "reference"), inputs)


def by_chunks(size: int, u: Tensor, *parameters: Tensor) -> Tensor:
    *parameters, x = parameters
    outputs = []
    for piece in u.split(size, dim=1):
        y, x = flat.diagonal_ssm_chunk(piece, *parameters, x, backend="numba")
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def by_steps(u: Tensor, *parameters: Tensor) -> Tensor:
    *parameters, x = parameters
    outputs = []
    for token in u.unbind(dim=1):
        y, x = flat.diagonal_ssm_step(token, *parameters, x, backend="numba")
        outputs.append(y)
    return torch.stack(outputs, dim=1)


def by_steps_in_place(u: Tensor, *parameters: Tensor) -> Tensor:
    *parameters, x = parameters
    stepper = flat.diagonal_ssm_stepper(*parameters, torch.zeros(16), backend="numba")
    return torch.stack([stepper(token, x) for token in u.unbind(dim=1)], dim=1)


READINGS: dict[str, Callable[..., Tensor]] = {
    **{f"chunks of {size}": partial(by_chunks, size) for size in (1, 5, 16, 100)},
    "steps": by_steps,
    "steps in place": by_steps_in_place,
}


@pytest.mark.parametrize("reading", READINGS)
def test_rounding_does_not_add_up_in_the_state(reading: str) -> None:
    torch.manual_seed(0)
    parameters = [t.detach() for t in DiagonalSSM(16).weights()]
    u, x = torch.randn(1, 2000, 16), torch.zeros(1, 16, 32, 2)
    wanted = flat.diagonal_ssm(*(t.double() for t in (u, *parameters)))
    assert relative(READINGS[reading](u, *parameters, x), wanted) <= 1e-6


def step_inputs(function: str, channels: int = 18) -> Inputs:
    if function == "diagonal_ssm_step":
        u, *others = diagonal(3, 1, channels, 5)
        return [u[:, 0], *others]
    if function == "selective_scan_step":
        u, dt, a, b, c, state = scan(3, 1, channels, 5, groups=3)
        return [u[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], state]
    if function == "linear_attention_step":
        q, k, v = normal(3, 2, 5), normal(3, 2, 5, seed=1), normal(3, 4, 7)
        return [q, k, v, -normal(3, 4).exp(), normal(3, 4, 5, 7)]
    if function == "gated_delta_rule_step":
        q, k, v = normal(3, 4, 5), F.normalize(normal(3, 4, 5, seed=1), dim=-1), normal(3, 4, 7)
        return [q, k, v, -normal(3, 4).exp(), normal(3, 4, seed=1).sigmoid(), normal(3, 4, 5, 7)]
    if function == "delta_rule_step":
        *signals, state = correcting(3, 1, 4, 5)
        return [*(x[:, 0] for x in signals), state]
    q, k, v, taps, *others = core(3, 1, channels, 5)
    return [q[:, 0], k[:, 0], v[:, 0], taps, *others]


def run_step(function: str, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    return run(function, backend)


@pytest.mark.parametrize("function", STEPS)
def test_a_step_is_the_definition(function: str) -> None:
    inputs = step_inputs(function)
    before = [t.clone() for t in inputs]
    wanted = run_step(function, "reference")(*inputs)
    for dtype, limit in ((torch.float64, 1e-13), (torch.float32, 3e-6)):
        found = run_step(function, "numba")(*(t.to(dtype) for t in inputs))
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= limit * b.abs().max()
            assert a.dtype == dtype
    assert all(a.equal(b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("function", STEPS)
def test_a_step_that_needs_a_gradient_goes_elsewhere(function: str) -> None:
    inputs = step_inputs(function)
    run_step(function, "numba")(*inputs)
    inputs[0].requires_grad_()
    with pytest.raises(InputError, match="the numba step records no gradient"):
        run_step(function, "numba")(*inputs)
    with torch.no_grad():
        run_step(function, "numba")(*inputs)


def test_linear_attention_without_decay_steps_as_defined() -> None:
    q, k, v, _, state = step_inputs("linear_attention_step")
    wanted = run_step("linear_attention_step", "reference")(q, k, v, None, state)
    found = run_step("linear_attention_step", "numba")(q, k, v, None, state)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_wide_heads_and_several_outputs_step_as_defined() -> None:
    q, k, v, taps, log_a, b, _, _, past, _ = core(3, 1, 12, 5)
    b, c, skip = b[:4], normal(8, 5, 2), normal(8)  # four heads of three channels, two outputs
    state, weights = normal(3, 3, 3, 4, 5, 2), taps
    for copies in (1, 4):
        parameters = [weights, log_a[:copies], b, c, skip, past, state]
        inputs = [q[:, 0], k[:, 0], v[:, 0], *parameters]
        wanted = run_step("h3_core_step", "reference")(*inputs)
        for x, y in zip(run_step("h3_core_step", "numba")(*inputs), wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_without_data_and_other_types_go_elsewhere(function: str) -> None:
    meta = [t.to("meta") for t in inputs_of(function, 1, 3, 2, 2)]
    with pytest.raises(InputError, match="numba runs on the CPU, not on meta"):
        run(function)(*meta)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "LEAST_WORK", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("batch", "length"), [(3, 150), (9, 13)])
def test_the_number_of_threads_changes_no_bit(function: str, batch: int, length: int) -> None:
    inputs = [t.float() for t in inputs_of(function, batch, length, 50, 5)]
    found = all_of(function, inputs)
    torch.set_num_threads(1)
    for a, b in zip(found, all_of(function, inputs), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_operators_keep_pytorchs_rules(function: str) -> None:
    inputs = tuple(t.requires_grad_() for t in inputs_of(function, 2, 5, 3, 2))
    all_of(function, inputs)  # imports the backend, which registers its operators
    operator = getattr(torch.ops.stateline, f"{function.removesuffix('_chunk')}_kernel").default
    if function == "diagonal_ssm":
        inputs = *inputs, None
    elif function == "selective_scan":
        u, dt, a, b, c, state = inputs
        inputs = u, dt, b, c, a, state
    starts = torch.tensor([[True, False, True, False, False]] * 2)
    takes_starts = len(operator._schema.arguments) > len(inputs)
    for more in [(None,), (starts,)] if takes_starts else [()]:
        torch.library.opcheck(operator, (*inputs, *more))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_slices_of_a_wider_tensor_are_read_as_they_are(function: str) -> None:
    inputs = inputs_of(function, 2, 9, 3, 2)
    wide = [F.pad(t, (2, 1))[..., 2:-1] for t in inputs]
    for a, b in zip(all_of(function, inputs), all_of_views(function, wide), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_lazily_negated_tensors_are_read_with_their_sign(function: str) -> None:
    inputs = inputs_of(function, 2, 9, 3, 2)
    negated = [torch._neg_view(-t) for t in inputs]
    for a, b in zip(all_of(function, inputs), all_of_views(function, negated), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sizes", [(2, 0, 3, 2), (0, 5, 3, 2)])
def test_sequences_without_tokens_or_rows_have_gradients(
    function: str, sizes: tuple[int, ...]
) -> None:
    inputs = inputs_of(function, *sizes)
    gradients = all_of(function, inputs)[-len(inputs) :]
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()


def test_an_empty_tensor_is_read_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy before 2.4 refuses address 0, where an empty tensor is."""
    monkeypatch.delattr(launch, "SimpleNamespace")
    assert launch.array(torch.empty(0, 3), torch.float32).shape == (0, 3)


def test_exchanged_batch_axes_are_read_as_they_are() -> None:
    u, kernel = normal(2, 3, 9, 4).transpose(0, 1), normal(4, 3)
    assert run("short_conv")(u, kernel).equal(run("short_conv")(u.contiguous(), kernel))


def all_of_views(function: str, inputs: Inputs) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in inputs]
    outputs = run(function)(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), leaves)
    return [t.detach() for t in (*outputs, *gradients)]


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    import os

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numba_is_imported_when_it_computes_and_torch_runs_without_it() -> None:
    code = """
import sys
import torch
from stateline.ops import OPS, short_conv
print("numba" in sys.modules)
sys.modules["numba"] = None
u, kernel = torch.ones(1, 3, 1), torch.ones(1, 2)
print(short_conv(u, kernel).flatten().tolist())
print(OPS["short_conv"].reasons("short_conv", u, kernel)["numba"])
"""
    imported, outputs, reason = python(code).splitlines()
    assert imported == "False"
    assert outputs == "[1.0, 2.0, 2.0]"
    assert reason == "import failed: numba is not installed: pip install numba"


COMPUTE = """
import torch
from stateline.ops import DiagonalWeights, H3Weights, ScanSignals
from stateline.ops import diagonal_ssm, h3_core, selective_scan

def results():
    g = torch.Generator().manual_seed(0)
    n = lambda *shape: torch.randn(shape, generator=g).requires_grad_()
    u, b, c, log_a = n(3, 150, 40), n(40, 5, 2), n(40, 5, 2), n(40, 5, 2)
    weights = DiagonalWeights(log_a.square() * -0.2, b, c)
    y = diagonal_ssm(u, weights)[0].square().sum()
    y = y + h3_core(u, u * 2, u + 1, H3Weights(n(40, 7), weights, n(40)))[0].square().sum()
    x = ScanSignals(u, u.square(), n(3, 150, 1, 6), n(3, 150, 1, 6))
    y = y + selective_scan(x, -n(40, 6).square(), n(3, 40, 6))[0].square().sum()
    return [y.item(), *(t.double().sum().item() for t in torch.autograd.grad(y, [u, b, c, log_a]))]
"""


FORK = """
import os
from stateline.ops.numba_common import launch
launch.LEAST_WORK = 0
torch.set_num_threads(2)
print(wanted := results())
child = os.fork()
if not child:
    os._exit(results() != wanted)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_what_memory_held_before_changes_nothing_and_a_fork_has_threads_of_its_own() -> None:
    here: dict[str, Any] = {}
    exec(COMPUTE, here)
    there, forked = python(COMPUTE + FORK, MALLOC_PERTURB_="1").splitlines()
    assert there == str(here["results"]())
    assert forked == "0"
