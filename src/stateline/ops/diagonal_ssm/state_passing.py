"""State passing as a differentiable function of signals and weights.

Signals are (row, channel, length), the states of the kernels (row, channel, 2, mode). Only the
inputs are saved for the backward pass, which computes the states again.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.diagonal_ssm import DiagonalWeights
from stateline.ops.diagonal_ssm import triton_kernel as diagonal
from stateline.ops.kernel_op import KernelOp
from stateline.ops.planes import conjugate, multiply, powers_of
from stateline.ops.short_conv import triton_kernel as filters
from stateline.ops.triton_common.launch import PRECISION, channels_first, empty, on, round_up

ROWS = 16
"""Blocks that a program handles at once: the fewest rows of a matrix product."""

PROGRAMS = 512
"""Programs of the backward pass that keep a GPU busy; batch rows are divided to reach them."""


class Signals(NamedTuple):
    """What the kernels read (row, channel, length): for H3 q, k and v; otherwise v alone.

    Attributes:
        v: Input of the model; for H3, it is multiplied by the filtered keys.
        q: Factor of the output.
        k: Keys.
        past: Keys before the signal (row, channel, taps - 1).
        weights: Filter of the keys (channel, taps).
        numbers: How many documents of each row have begun (row, length).
    """

    v: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    past: Tensor | None = None
    weights: Tensor | None = None
    numbers: Tensor | None = None


class Tables(NamedTuple):
    """Tables of the kernels for a diagonal SSM, per channel.

    Attributes:
        taps: For each output, the first T entries of the impulse response, with the skip.
        into: Effect of each input of a block on the state after it.
        out: Effect of the state before a block on each of its outputs.
        leap: Powers 0, T, ..., ROWS T of the transition.
    """

    taps: Tensor
    into: Tensor
    out: Tensor
    leap: Tensor


def _tables(
    log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, length: int
) -> tuple[Tables, Tensor]:
    """Tables for signals of this length, and the powers 0, 1, ..., T of the transition.

    They are differentiable. Powers are computed in float64.
    """
    size = 16 if length <= 256 else 32  # longer blocks: fewer states, more products per input
    padding = round_up(b.shape[1]) - b.shape[1]
    log_a, b, c = (F.pad(t.float(), (0, 0, 0, padding)) for t in (log_a, b, c))
    log_a = log_a.expand(len(b), -1, -1)
    exponents = torch.arange(size + 1, device=log_a.device)
    powers, readouts = powers_of(log_a, exponents).float(), c.unflatten(0, (-1, len(b)))
    response = multiply(multiply(readouts, b)[..., None, :], powers[..., :-1, :])
    impulse = 2 * response[..., 0].sum(dim=2).flatten(0, 1)
    if skip is not None:
        impulse = impulse + F.pad(skip.float()[:, None], (0, size - 1))
    into = multiply(b[..., None, :], powers[..., :-1, :].flip(-2))
    read = 2 * multiply(readouts[..., None, :], powers[..., 1:, :]).flatten(0, 1)
    out = conjugate(read)
    leap = powers_of(log_a, size * torch.arange(ROWS + 1, device=log_a.device)).float()
    into, out = into.permute(0, 3, 2, 1).contiguous(), out.permute(0, 3, 1, 2).contiguous()
    return Tables(impulse, into, out, leap.permute(0, 3, 2, 1).contiguous()), powers


def _pointers(x: Signals) -> tuple[Tensor, ...]:
    """q, k, v, past and weights as kernels take them; without gates, only v is read."""
    if x.q is None or x.k is None or x.past is None or x.weights is None:
        return (*channels_first(x.v),) * 5
    return *channels_first(x.q, x.k, x.v), x.past, x.weights


def _sizes(x: Signals, table: Tables) -> dict[str, Any]:
    """What the kernels are compiled for."""
    size, count = table.taps.shape[1], 1 if x.weights is None else x.weights.shape[1]
    return {
        "COUNT": count,
        "BACK": -(-(count - 1) // size),
        "GATED": x.q is not None,
        "RESETS": x.numbers is not None,
        "ROWS": ROWS,
        "T": size,
        "N": table.into.shape[3],
        "PRECISION": PRECISION[x.v.dtype],
    }


def _forward(x: Signals, table: Tables, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the state before the last block, and the inputs of it that reach its end."""
    tail = empty((*x.v.shape[:2], table.taps.shape[1]), first)
    found = empty(tuple(x.v.shape), x.v), empty(tuple(first.shape), first), tail
    _launch(x, table, first, (*found, first), output=True)
    return found[0].to(x.v.dtype), *found[1:]


def _launch(
    x: Signals, table: Tables, first: Tensor, places: tuple[Tensor, ...], *, output: bool
) -> None:
    """Run the forward kernel: outputs, last state and last block, or the carried states."""
    signals = _pointers(x)
    v = signals[2]
    rows, channels, length = v.shape
    with on(v):
        diagonal.forward[(channels, rows)](
            *signals, *table, first, v if x.numbers is None else x.numbers, *places,
            length, *v.stride()[:2], channels,
            **_sizes(x, table), OUTPUT=output, num_warps=4, num_stages=1,
        )  # fmt: skip


def _backward(
    grad: Tensor, grad_last: Tensor, grad_tail: Tensor, x: Signals, table: Tables, first: Tensor
) -> Any:
    """Gradients of the signals, the tables and the first state."""
    signals = _pointers(x)
    v, (taps, into, out, leap) = signals[2], table
    rows, channels, length = v.shape
    spans, pieces = -(-length // (taps.shape[1] * ROWS)), _pieces(rows, channels)
    carries = empty((rows, channels, spans, *first.shape[2:]), first)
    _launch(x, table, first, (v, first, first, carries), output=False)
    dv, dfirst = empty(tuple(v.shape), v), empty(tuple(first.shape), first)
    dq, dkeys = (dv, dv) if x.q is None else (empty(dv.shape, v), empty(dv.shape, first))
    shapes = (taps.shape[1],) * 2, into.shape[1:], out.shape[1:], first.shape[2:]
    sheets = [empty((pieces, channels, *shape), first) for shape in shapes]
    outer = [g.contiguous() for g in (grad, grad_last, grad_tail)]
    with on(v):
        diagonal.backward[(channels, pieces)](
            *signals, *table, carries, v if x.numbers is None else x.numbers, *outer,
            dq, dkeys, dv, *sheets, dfirst, rows, length, *v.stride()[:2], channels, pieces,
            **_sizes(x, table), num_warps=8, num_stages=1,
        )  # fmt: skip
    dtoeplitz, dinto, dout, ddecay = (s.sum(dim=0) for s in sheets)
    dleap = torch.zeros_like(leap)
    dleap[:, :, 1] = ddecay
    of_table = Tables(_diagonals(dtoeplitz)[:, taps.shape[1] - 1 :], dinto, dout, dleap)
    if x.k is None or x.past is None or x.weights is None:
        return Signals(dv), of_table, dfirst
    compiled = _sizes(x, table)
    sizes = {name: compiled[name] for name in ("COUNT", "BACK", "RESETS", "ROWS", "T", "PRECISION")}
    of_keys = _filter_gradients(dkeys, x.k, x.past, x.weights, x.numbers, sizes)
    return Signals(dv, dq, *of_keys), of_table, dfirst


def _pieces(rows: int, channels: int) -> int:
    return max(1, min(rows, PROGRAMS // channels))


def _diagonals(x: Tensor) -> Tensor:
    """Sums along the diagonals of square matrices: x[j, i] belongs to entry i - j + T - 1."""
    size = x.shape[-1]
    wide = F.pad(x.flip(-2), (0, size)).flatten(-2)[..., : size * (2 * size - 1)]
    return wide.unflatten(-1, (size, 2 * size - 1)).sum(dim=-2)


def _filter_gradients(
    dkeys: Tensor,
    k: Tensor,
    past: Tensor,
    weights: Tensor,
    numbers: Tensor | None,
    sizes: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the keys, the past and the filter, from the gradient of the filtered keys."""
    (k,) = channels_first(k)
    (rows, channels, length), count, size = k.shape, weights.shape[1], sizes["T"]
    back, pieces = sizes["BACK"], _pieces(rows, channels)
    counted = k if numbers is None else numbers
    dk, dpast = empty(k.shape, dkeys), empty(past.shape, past)
    dband = empty((pieces, channels, back + 1, size, size), dkeys)
    with on(k):
        spans = -(-(length + back * size) // (ROWS * size))
        filters.signal_gradient[(channels, rows, spans)](
            dkeys, weights, dk, dpast, counted, length, channels, **sizes
        )
        filters.weight_gradient[(channels, pieces, back + 1)](
            dkeys, k, past, dband, counted, rows, length, *k.stride()[:2], channels, pieces, **sizes
        )
    lags = _diagonals(dband.sum(dim=0))  # block m starts at m * size - (size - 1)
    dweights = lags.new_zeros(channels, (back + 2) * size)
    for block in range(back + 1):
        dweights[:, block * size : (block + 2) * size - 1] += lags[:, block]
    return dk, dpast, dweights[:, size - 1 : size - 1 + count]


def _fake(x: Signals, table: Tables, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tail = first.new_empty(*x.v.shape[:2], table.taps.shape[1])
    return x.v.new_empty(x.v.shape), first.new_empty(first.shape), tail


_passed = KernelOp("pass_states", _forward, _backward, _fake)


def pass_states(
    x: Signals,
    weights: DiagonalWeights,
    skip: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Any]:
    """Outputs (row, output, length) and the state after them, ``None`` if no state is given.

    Several readouts of a channel run as separate channels. States are (row, channel, mode, 2).
    """
    (rows, channels, length), (outputs, modes) = x.v.shape, weights.c.shape[:2]
    table, powers = _tables(*weights, skip, length)
    own, (size, wide) = table.into, table.into.shape[2:]
    if state is None:
        first = own.new_zeros(rows, channels, 2, wide)
    else:
        first = F.pad(state.float(), (0, 0, 0, wide - modes)).mT.contiguous()
    if (readouts := outputs // channels) > 1:
        into, leap = (t.repeat(readouts, 1, 1, 1) for t in (own, table.leap))
        table, first = table._replace(into=into, leap=leap), first.repeat(1, readouts, 1, 1)
        x = x._replace(v=x.v.repeat(1, readouts, 1))
    if starts is not None:
        x = x._replace(numbers=starts.reshape(-1, length).cumsum(1, dtype=torch.int32))
    y, before, tail = _passed(x, table, first)
    if state is None:
        return y, None
    rest = (length - 1) % size + 1  # inputs of the last block
    driven = torch.einsum("bdj,dpjn->bdnp", tail[:, :channels, :rest], own[:, :, size - rest :])
    after = multiply(powers[:, :, rest], before[:, :channels].mT) + driven
    return y, after[..., :modes, :].to(state.dtype)
