"""The two causal convolutions are one function."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import OPS, fft_conv, short_conv, short_conv_step, slide

CONVOLUTIONS = {"fft_conv": fft_conv, "short_conv": short_conv}
ALL = [(op, backend) for op in CONVOLUTIONS for backend in ("torch", "reference")]
ALL += [("short_conv", "numba")]
FASTER = [(op, backend) for op, backend in ALL if backend != "reference"]
LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 13, 16, 23, 32, 37])
TAPS = st.sampled_from([1, 2, 3, 4, 11, 15, 16, 17, 32, 40])


def signal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(op: str, backend: str) -> Callable[..., Tensor]:
    return lambda *inputs: CONVOLUTIONS[op](*inputs, backend=backend)


@pytest.mark.parametrize("op", CONVOLUTIONS)
def test_the_definition_is_a_convolution(op: str) -> None:
    u, kernel = signal(11, 2), signal(4, 5)
    y = CONVOLUTIONS[op](u, kernel, backend="reference")
    for output in range(4):
        wanted = np.convolve(u[:, output % 2].numpy(), kernel[output].numpy())[:11]
        np.testing.assert_allclose(y[:, output].numpy(), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("taps", "filters"), [(4, 1), (4, 3), (2, 2)])
def test_steps_are_the_convolution(
    agrees: Callable[..., None], backend: str, taps: int, filters: int
) -> None:
    def steps(u: Tensor, kernel: Tensor, past: Tensor) -> Tensor:
        weights, outputs = kernel.unflatten(0, (filters, -1)).flip(-1).mT, []
        for u_t in u.unbind(dim=1):
            y, past = short_conv_step(u_t, weights, past, backend=backend)
            outputs.append(y)
        return torch.stack(outputs, dim=1)

    inputs = [signal(2, 5, 3), signal(3 * filters, taps, seed=1), signal(2, taps - 1, 3, seed=2)]
    agrees(steps, lambda *whole: short_conv(*whole, backend="reference"), inputs)


@pytest.mark.parametrize(("op", "backend"), FASTER)
@settings(max_examples=15)
@example(length=37, taps=15, channels=2, filters=3, batch=(2,))
@example(length=37, taps=16, channels=2, filters=3, batch=(2,))
@example(length=1, taps=40, channels=1, filters=1, batch=())
@given(
    length=LENGTHS,
    taps=TAPS,
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    batch=st.sampled_from([(), (2,)]),
)
def test_equals_the_definition(
    agrees: Callable[..., None],
    op: str,
    backend: str,
    length: int,
    taps: int,
    channels: int,
    filters: int,
    batch: tuple[int, ...],
) -> None:
    inputs = [signal(*batch, length, channels), signal(filters * channels, taps, seed=1)]
    agrees(run(op, backend), run(op, "reference"), inputs)


@pytest.mark.parametrize(("op", "backend"), FASTER)
def test_a_past_counts_as_in_the_definition(
    agrees: Callable[..., None], op: str, backend: str
) -> None:
    inputs = [signal(2, 7, 3), signal(6, 5, seed=1), signal(2, 4, 3, seed=2)]
    agrees(run(op, backend), run(op, "reference"), inputs)


@pytest.mark.parametrize(("op", "backend"), ALL)
@pytest.mark.parametrize("length", [8, 13, 31])
def test_the_end_does_not_wrap_around_to_the_start(op: str, backend: str, length: int) -> None:
    u = torch.zeros(1, length, 1, dtype=torch.float64)
    u[0, -1] = 1
    y = CONVOLUTIONS[op](u, torch.ones(1, length, dtype=torch.float64), backend=backend)
    assert y[0, :-1].abs().max() < 1e-14


@pytest.mark.parametrize(("op", "backend"), ALL)
def test_taps_beyond_the_signal_have_no_effect(op: str, backend: str) -> None:
    u, kernel = signal(2, 5, 2), signal(2, 20).requires_grad_()
    y = CONVOLUTIONS[op](u, kernel, backend=backend)
    torch.testing.assert_close(y, CONVOLUTIONS[op](u, kernel[:, :5], backend="reference"))
    y.sum().backward()
    assert kernel.grad is not None
    assert kernel.grad[:, 5:].abs().max() == 0


@pytest.mark.parametrize(("op", "backend"), ALL)
def test_all_leading_axes_are_batch_axes(op: str, backend: str) -> None:
    u, kernel = signal(2, 3, 2, 9, 2), signal(2, 4)
    y = CONVOLUTIONS[op](u, kernel, backend=backend)
    rows = [CONVOLUTIONS[op](row, kernel, backend=backend) for row in u.reshape(12, 9, 2)]
    torch.testing.assert_close(y.reshape(12, 9, 2), torch.stack(rows), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("op", "backend"), ALL)
def test_an_empty_signal_gives_an_empty_one(op: str, backend: str) -> None:
    y = CONVOLUTIONS[op](signal(2, 0, 3), signal(3, 4), signal(2, 3, 3), backend=backend)
    assert y.shape == (2, 0, 3)


@pytest.mark.parametrize("backend", ["numba", "torch", "reference"])
@pytest.mark.parametrize("batch", [(), (0,), (2, 0)])
def test_documents_may_be_in_one_row_without_an_axis_or_in_none(
    backend: str, batch: tuple[int, ...]
) -> None:
    u, starts = signal(*batch, 4, 3), torch.tensor([False, False, True, False]).expand(*batch, 4)
    y = short_conv(u, signal(3, 2), starts=starts, backend=backend)
    wanted = short_conv(u[..., None, :, :], signal(3, 2), starts=starts[..., None, :])[..., 0, :, :]
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("op", "backend"), ALL)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision(op: str, backend: str, half: torch.dtype) -> None:
    u, kernel = signal(2, 9, 3).to(half).requires_grad_(), signal(3, 4).float().requires_grad_()
    y = CONVOLUTIONS[op](u, kernel, backend=backend)
    y.float().sum().backward()
    assert y.dtype == half
    assert u.grad is not None
    assert u.grad.dtype == half
    assert kernel.grad is not None
    assert kernel.grad.dtype == torch.float32


@pytest.mark.parametrize(("op", "backend"), FASTER)
@pytest.mark.parametrize("taps", [4, 37])
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], op: str, backend: str, taps: int
) -> None:
    rounds_well(run(op, backend), run(op, "reference"), [signal(3, 37, 4), signal(4, taps, seed=1)])


@pytest.mark.parametrize(("op", "backend"), ALL)
@settings(max_examples=15)
@given(cut=st.integers(1, 12), taps=st.sampled_from([1, 2, 6, 16, 20]))
def test_two_chunks_are_the_whole(op: str, backend: str, cut: int, taps: int) -> None:
    u, kernel = signal(2, 13, 2).requires_grad_(), signal(2, taps, seed=1).requires_grad_()
    past = u.new_zeros(2, taps - 1, 2)
    head, tail = u[:, :cut], u[:, cut:]
    pieces = [
        run(op, backend)(head, kernel, past),
        run(op, backend)(tail, kernel, slide(past, head)),
    ]
    chunked, whole = torch.cat(pieces, dim=1), run(op, "reference")(u, kernel)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)
    weight = signal(2, 13, 2, seed=2)
    found, wanted = (torch.autograd.grad((y * weight).sum(), [u, kernel]) for y in (chunked, whole))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@given(steps=st.lists(st.integers(1, 4), min_size=1, max_size=5), held=st.integers(0, 6))
@settings(max_examples=15)
def test_slide_holds_the_latest_inputs(steps: list[int], held: int) -> None:
    inputs = torch.arange(1.0, 1 + sum(steps))[:, None]
    past = torch.zeros(held, 1)
    for piece in inputs.split(steps):
        past = slide(past, piece)
    wanted = [0.0] * held + inputs.flatten().tolist()
    assert past.flatten().tolist() == wanted[len(wanted) - held :]


@pytest.mark.parametrize(("op", "backend"), FASTER)
@pytest.mark.parametrize("taps", [4, 32])
def test_nothing_but_the_inputs_is_kept_for_the_backward_pass(
    op: str, backend: str, taps: int
) -> None:
    u, kernel = signal(2, 32, 4).requires_grad_(), signal(4, taps).requires_grad_()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        CONVOLUTIONS[op](u, kernel, backend=backend)
    assert set(kept) <= {u.data_ptr(), kernel.data_ptr()}


@pytest.mark.parametrize("length", [256, 1024])
def test_an_outlier_changes_earlier_outputs_by_rounding_of_the_fft_only(length: int) -> None:
    u = signal(1, length, 4).float()
    kernel = (signal(4, length) * torch.exp(-torch.arange(length) / 50.0)).float()
    with_outlier = u.clone()
    with_outlier[:, -1] = 1e4

    def change(backend: str) -> float:
        y, z = (fft_conv(x, kernel, backend=backend)[:, :-1] for x in (u, with_outlier))
        return float((y - z).abs().max())

    assert change("reference") == 0
    assert 0 < change("torch") <= 1e-7 * 1e4 * float(kernel.norm(dim=1).max())


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(("op", "backend"), ALL)
def test_every_channel_needs_as_many_kernels(op: str, backend: str) -> None:
    with pytest.raises(InputError) as caught:
        CONVOLUTIONS[op](torch.ones(1, 5, 3), torch.ones(4, 4), backend=backend)
    assert str(caught.value) == (
        f"{op}: the number of kernels must be a multiple of the number of channels: "
        "got 4 kernels for 3 channels"
    )


@pytest.mark.usefixtures("unannotated")  # symbolic lengths are no integers
@pytest.mark.parametrize("op", CONVOLUTIONS)
@pytest.mark.parametrize(("channels", "filters"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules(op: str, channels: int, filters: int) -> None:
    OPS[op].prepare(op)  # import the backends, which define the operators
    u, kernel = torch.randn(2, 7, channels), torch.randn(filters * channels, 4)
    forward = getattr(torch.ops.stateline, op).default
    backward = getattr(torch.ops.stateline, f"{op}_backward").default
    signal = (
        u.tile(filters) if op == "short_conv" else u
    )  # tap by tap there is one for each channel
    inputs = (signal.clone().requires_grad_(), kernel.clone().requires_grad_())
    torch.library.opcheck(forward, inputs)
    torch.library.opcheck(backward, (torch.randn(2, 7, len(kernel)), signal, kernel))
