"""The kernels of state passing as differentiable functions of signals and tables.

Signals are (row, channel, length), states (row, channel, 2, mode). Only the inputs are saved for
the backward pass, which computes the states again.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.diagonal_ssm import triton_kernel as diagonal
from stateline.ops.kernel_op import define_kernel_op, empty_like
from stateline.ops.planes import exponential, multiply
from stateline.ops.short_conv import triton_kernel as filters
from stateline.ops.triton_common.launch import (
    PRECISION,
    channels_first,
    empty,
    on,
    round_up,
)

ROWS = 16
"""Blocks that a program handles at once: the fewest rows of a matrix product."""

PROGRAMS = 512
"""Programs of the backward pass that keep a GPU busy; batch rows are divided to reach them."""

MOST_MODES = 64
"""Most modes whose tables fit into the memory of a multiprocessor."""


class Tables(NamedTuple):
    """Tables of the kernels for a diagonal SSM, per channel, and for the end of a chunk.

    Attributes:
        taps: For each output, the first T entries of the impulse response, with the skip.
        into: Effect of each input of a block on the state after it.
        out: Effect of the state before a block on each of its outputs.
        leap: Powers 0, T, ..., ROWS T of the transition.
        powers: Powers 0, 1, ..., T.
    """

    taps: Tensor
    into: Tensor
    out: Tensor
    leap: Tensor
    powers: Tensor


def block_size(length: int) -> int:
    """Inputs per block: longer blocks need fewer states, shorter ones fewer products per input."""
    return 16 if length <= 256 else 32


def tables(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, length: int) -> Tables:
    """Tables for signals of this length; differentiable. Powers are computed in float64."""
    size = block_size(length)
    padding = round_up(b.shape[1]) - b.shape[1]
    log_a, b, c = (F.pad(t.float(), (0, 0, 0, padding)) for t in (log_a, b, c))
    log_a = log_a.expand(len(b), -1, -1)
    powers, readouts = _powers(log_a, size, 1), c.unflatten(0, (-1, len(b)))
    response = multiply(multiply(readouts, b)[..., None, :], powers[..., :-1, :])
    impulse = 2 * response[..., 0].sum(dim=2).flatten(0, 1)
    if skip is not None:
        impulse = impulse + F.pad(skip.float()[:, None], (0, size - 1))
    into = multiply(b[..., None, :], powers[..., :-1, :].flip(-2))
    read = 2 * multiply(readouts[..., None, :], powers[..., 1:, :]).flatten(0, 1)
    out = read * read.new_tensor([1.0, -1.0])
    leap = _powers(log_a, ROWS, size)
    return Tables(
        impulse,
        into.permute(0, 3, 2, 1).contiguous(),
        out.permute(0, 3, 1, 2).contiguous(),
        leap.permute(0, 3, 2, 1).contiguous(),
        powers,
    )


def planes_first(state: Tensor, modes: int) -> Tensor:
    """A state (row, channel, mode, 2) as the kernels hold it."""
    return F.pad(state.float(), (0, 0, 0, modes - state.shape[-2])).mT.contiguous()


def finish(before: Tensor, tail: Tensor, length: int, table: Tables) -> Tensor:
    """The state after a signal (row, channel, mode, 2), from the state before its last block."""
    size = table.taps.shape[1]
    rest = (length - 1) % size + 1
    driven = torch.einsum("bdj,dpjn->bdnp", tail[..., :rest], table.into[:, :, size - rest :])
    return multiply(table.powers[:, :, rest], before.mT) + driven


def _powers(log_a: Tensor, count: int, stride: int) -> Tensor:
    """Powers 0, stride, ..., count * stride: (channel, mode, power, 2)."""
    exponents = stride * torch.arange(count + 1, device=log_a.device)
    return exponential(log_a.double()[..., None, :] * exponents[:, None]).float()


def _launch(
    signals: tuple[Tensor, ...],
    keys_filter: tuple[Tensor, ...],
    table: tuple[Tensor, ...],
    first: Tensor,
    *,
    output: bool,
) -> tuple[Tensor, ...]:
    """Run the forward kernel: outputs, last state and last block, or the carried states."""
    laid = channels_first(*signals)
    v = laid[-1]
    rows, channels, length = v.shape
    spans = -(-length // (table[0].shape[1] * ROWS))
    found: tuple[Tensor, ...]
    places: tuple[Tensor, ...]
    if output:
        tail = empty((rows, channels, table[0].shape[1]), first)
        found = empty(v.shape, v), empty(first.shape, first), tail
        places = (*found, first)
    else:
        found = (empty((rows, channels, spans, *first.shape[2:]), first),)
        places = (v, first, first, *found)
    with on(v):
        diagonal.forward[(channels, rows)](
            *_gates(laid, keys_filter), *table, first, *places, length, *v.stride()[:2], channels,
            **_sizes(keys_filter, table, v), OUTPUT=output, num_warps=4, num_stages=1,
        )  # fmt: skip
    return found


def _gates(signals: list[Tensor], keys_filter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Pointers q, k, v, past and weights of the kernels; without gates only v is read."""
    v = signals[-1]
    return (*signals, *keys_filter) if keys_filter else (v,) * 5


def _sizes(keys_filter: tuple[Tensor, ...], table: tuple[Tensor, ...], v: Tensor) -> dict[str, Any]:
    """What the kernels are compiled for."""
    size, count = table[0].shape[1], keys_filter[1].shape[1] if keys_filter else 1
    return {
        "COUNT": count,
        "BACK": -(-(count - 1) // size),
        "GATED": bool(keys_filter),
        "ROWS": ROWS,
        "T": size,
        "N": table[1].shape[3],
        "PRECISION": PRECISION[v.dtype],
    }


class _Gradients(NamedTuple):
    signals: tuple[Tensor, ...]
    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    first: Tensor


def _gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    signals: tuple[Tensor, ...],
    keys_filter: tuple[Tensor, ...],
    table: tuple[Tensor, ...],
    first: Tensor,
) -> _Gradients:
    """Gradients of q, of the filtered keys and v (or of v alone), tables and first state."""
    (carries,) = _launch(signals, keys_filter, table, first, output=False)
    laid = channels_first(*signals)
    v = laid[-1]
    rows, channels, length = v.shape
    taps, into, out, leap = table
    pieces = _pieces(rows, channels)
    dv, dfirst = empty(v.shape, v), empty(first.shape, first)
    dq, dkeys = (empty(v.shape, v), empty(v.shape, first)) if keys_filter else (dv, dv)
    shapes = (taps.shape[1],) * 2, into.shape[1:], out.shape[1:], first.shape[2:]
    sheets = [empty((pieces, channels, *shape), first) for shape in shapes]
    outer = [g.contiguous() for g in grads]
    with on(v):
        diagonal.backward[(channels, pieces)](
            *_gates(laid, keys_filter), *table, carries, *outer, dq, dkeys, dv, *sheets, dfirst,
            rows, length, *v.stride()[:2], channels, pieces,
            **_sizes(keys_filter, table, v), num_warps=8, num_stages=1,
        )  # fmt: skip
    dtoeplitz, dinto, dout, ddecay = (s.sum(dim=0) for s in sheets)
    dleap = torch.zeros_like(leap)
    dleap[:, :, 1] = ddecay
    found = (dq, dkeys, dv) if keys_filter else (dv,)
    return _Gradients(
        found, (_diagonals(dtoeplitz)[:, taps.shape[1] - 1 :], dinto, dout, dleap), dfirst
    )


def _pieces(rows: int, channels: int) -> int:
    return max(1, min(rows, PROGRAMS // channels))


def _diagonals(x: Tensor) -> Tensor:
    """Sums along the diagonals of square matrices: x[j, i] belongs to entry i - j + T - 1."""
    size = x.shape[-1]
    wide = F.pad(x.flip(-2), (0, size)).flatten(-2)[..., : size * (2 * size - 1)]
    return wide.unflatten(-1, (size, 2 * size - 1)).sum(dim=-2)


def _forward(
    u: Tensor, taps: Tensor, into: Tensor, out: Tensor, leap: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y, *ends = _launch((u,), (), (taps, into, out, leap), first, output=True)
    return y.to(u.dtype), ends[0], ends[1]


def _backward(
    grad: Tensor,
    grad_last: Tensor,
    grad_tail: Tensor,
    u: Tensor,
    taps: Tensor,
    into: Tensor,
    out: Tensor,
    leap: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (u, taps, into, out, leap, first)
    found = _gradients((grad, grad_last, grad_tail), (u,), (), inputs[1:5], first)
    return _like((*found.signals, *found.tables, found.first), inputs)


def _forward_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor,
    weights: Tensor,
    taps: Tensor,
    into: Tensor,
    out: Tensor,
    leap: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, *ends = _launch((q, k, v), (past, weights), (taps, into, out, leap), first, output=True)
    kept = past.shape[2]
    latest = k[..., max(0, k.shape[2] - kept) :].float()
    keys = torch.cat([past, latest], dim=2)[..., latest.shape[2] :].contiguous()
    return y.to(q.dtype), ends[0], ends[1], keys


def _backward_gated(
    grad: Tensor,
    grad_last: Tensor,
    grad_tail: Tensor,
    grad_keys: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor,
    weights: Tensor,
    taps: Tensor,
    into: Tensor,
    out: Tensor,
    leap: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, past, weights, taps, into, out, leap, first)
    grads = grad, grad_last, grad_tail
    found = _gradients(grads, inputs[:3], (past, weights), inputs[5:9], first)
    dq, dkeys, dv = found.signals
    dk, dpast, dweights = _filter_gradients(dkeys, k, past, weights, taps.shape[1])
    new = min(k.shape[2], past.shape[2])  # the latest keys are also an output
    dk[..., k.shape[2] - new :] += grad_keys[..., past.shape[2] - new :]
    dpast[..., new:] += grad_keys[..., : past.shape[2] - new]
    return _like((dq, dk, dv, dpast, dweights, *found.tables, found.first), inputs)


def _filter_gradients(
    dkeys: Tensor, k: Tensor, past: Tensor, weights: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the keys, the past and the filter, from the gradient of the filtered keys."""
    (k,) = channels_first(k)
    (rows, channels, length), count = k.shape, weights.shape[1]
    back, pieces = -(-(count - 1) // size), _pieces(rows, channels)
    sizes: dict[str, Any] = {"COUNT": count, "BACK": back, "ROWS": ROWS, "T": size}
    sizes["PRECISION"] = PRECISION[k.dtype]
    dk, dpast = empty(k.shape, dkeys), empty(past.shape, past)
    dband = empty((pieces, channels, back + 1, size, size), dkeys)
    with on(k):
        spans = -(-(length + back * size) // (ROWS * size))
        filters.signal_gradient[(channels, rows, spans)](
            dkeys, weights, dk, dpast, length, channels, **sizes
        )
        filters.weight_gradient[(channels, pieces, back + 1)](
            dkeys, k, past, dband, rows, length, *k.stride()[:2], channels, pieces, **sizes
        )
    lags = _diagonals(dband.sum(dim=0))  # block m starts at m * size - (size - 1)
    dweights = lags.new_zeros(channels, (back + 2) * size)
    for block in range(back + 1):
        dweights[:, block * size : (block + 2) * size - 1] += lags[:, block]
    return dk, dpast, dweights[:, size - 1 : size - 1 + count]


def _like(gradients: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Any:
    """Gradients in the dtypes of the inputs."""
    return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))


def _fake(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, taps = others[-1], others[-5]
    tail = first.new_empty(*u.shape[:2], taps.shape[1])
    return u.new_empty(u.shape), first.new_empty(first.shape), tail


def _fake_backward(
    _grad: Tensor, _grad_last: Tensor, _grad_tail: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    return empty_like(*inputs)


def _fake_gated(q: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    past = others[2]
    return *_fake(q, *others), past.new_empty(past.shape)


def _fake_gated_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
    return empty_like(*tensors[4:])


pass_states = define_kernel_op("pass_states", _forward, _backward, _fake, _fake_backward)
"""``pass_states(u, taps, into, out, leap, first)``: outputs, state before the last block, block."""

pass_gated_states = define_kernel_op(
    "pass_gated_states", _forward_gated, _backward_gated, _fake_gated, _fake_gated_backward
)
"""The same for H3: ``(q, k, v, past, weights, taps, into, out, leap, first)``; and latest keys."""
