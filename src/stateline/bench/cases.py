"""The ops that ``stateline bench ops`` measures, on inputs as layers give them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline import ops
from stateline.layers.mixers.diagonal_ssm import convolution_flops

TAPS = 64
"""Taps of the filter of keys, as in H3."""

MODES = 32
"""Complex modes per channel: 64 real numbers of state, as in H3."""

D_STATE = 16
"""States per channel of a selective scan, as in Mamba."""

HEAD = 64
"""Width of a head of attention."""


@dataclass(frozen=True)
class Sizes:
    """How large a case is.

    Attributes:
        batch: Rows.
        length: Positions of a row.
        d_model: Channels.
        device: Where it computes.
        dtype: Of inputs and outputs.
    """

    batch: int
    length: int
    d_model: int
    device: torch.device
    dtype: torch.dtype = torch.float32

    @property
    def positions(self) -> int:
        """Positions times channels."""
        return self.batch * self.length * self.d_model

    def randn(self, *shape: int) -> Tensor:
        """Random input of the case's dtype."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def signal(self) -> Tensor:
        """Random signal (batch, length, channel); on a GPU with adjacent times, as in layers."""
        if self.device.type == "cuda":
            return self.randn(self.batch, self.d_model, self.length).mT
        return self.randn(self.batch, self.length, self.d_model)


@dataclass(frozen=True)
class Case:
    """One op on given inputs.

    Attributes:
        op: Name of the op's folder.
        run: ``run(*inputs, backend=...)`` returns the output.
        inputs: Tensors that require a gradient.
        n_bytes: Traffic that no implementation can avoid: inputs read, output written.
        flops: Arithmetic of the cheapest known algorithm.
    """

    op: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    n_bytes: float
    flops: float


def _case(op: str, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], flops: float) -> Case:
    traffic = float(sum(x.nbytes for x in inputs) + inputs[0].nbytes)
    return Case(op, run, tuple(x.requires_grad_() for x in inputs), traffic, flops)


def _diagonal(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithm of the transition, input and output vectors with time scales of 10 to 1,000."""
    shape, place = (sizes.d_model, MODES), sizes.device
    dt = torch.empty(sizes.d_model, 1, device=place).uniform_(-6.9, -2.3).exp()
    frequency = torch.pi * torch.arange(MODES, device=place)
    log_a = torch.stack([-0.5 * dt.expand(shape), dt * frequency], dim=-1)
    b, c = (torch.randn(*shape, 2, device=place) for _ in range(2))
    return log_a, dt[..., None] * b, c


def diagonal_ssm(sizes: Sizes) -> Case:
    """S4D's recurrence, kernel included."""
    u = sizes.signal()
    flops = sizes.positions * MODES * 12.0
    return _case("diagonal_ssm", ops.diagonal_ssm, (u, *_diagonal(sizes)), flops)


def h3_core(sizes: Sizes) -> Case:
    """The core of H3: shift filter, gate, recurrence, gate."""
    signals = (sizes.signal() for _ in range(3))
    taps = torch.randn(sizes.d_model, TAPS, device=sizes.device) / TAPS**0.5
    skip = torch.ones(sizes.d_model, device=sizes.device)
    flops = sizes.positions * (MODES * 12.0 + TAPS * 2.0)
    return _case("h3_core", ops.h3_core, (*signals, taps, *_diagonal(sizes), skip), flops)


def fft_conv(sizes: Sizes) -> Case:
    """Convolution with a given kernel that is as long as the sequence."""
    u = sizes.signal()
    kernel = torch.randn(sizes.d_model, sizes.length, device=sizes.device)
    flops = sizes.positions * convolution_flops(sizes.length)
    return _case("fft_conv", ops.fft_conv, (u, kernel), flops)


def short_conv(sizes: Sizes) -> Case:
    """Convolution with four taps."""
    u = sizes.randn(sizes.batch, sizes.length, sizes.d_model)
    kernel = torch.randn(sizes.d_model, 4, device=sizes.device)
    return _case("short_conv", ops.short_conv, (u, kernel), sizes.positions * 8.0)


def selective_scan(sizes: Sizes) -> Case:
    """Mamba's scan."""
    shape, place = (sizes.batch, sizes.length), sizes.device
    u = sizes.randn(*shape, sizes.d_model)
    dt = F.softplus(torch.randn(*shape, sizes.d_model, device=place) - 4)
    a = -torch.arange(1.0, D_STATE + 1, device=place).repeat(sizes.d_model, 1)
    b, c = (sizes.randn(*shape, 1, D_STATE) for _ in range(2))

    def run(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, backend: str) -> Tensor:
        state = dt.new_zeros(len(u), *a.shape)
        return ops.selective_scan(u, dt, a, b, c, state, backend=backend)[0]

    flops = sizes.positions * D_STATE * 6.0
    return _case("selective_scan", run, (u, dt.detach(), a, b, c), flops)


def _heads(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    heads = max(1, sizes.d_model // HEAD)
    shape = (sizes.batch, sizes.length, heads, sizes.d_model // heads)
    return sizes.randn(*shape), sizes.randn(*shape), sizes.randn(*shape)


def _memory(q: Tensor) -> Tensor:
    """Zero state with as many keys as values."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(len(q), *q.shape[2:], q.shape[-1], dtype=dtype, device=q.device)


def attention(sizes: Sizes) -> Case:
    """Causal softmax attention, heads of 64."""
    flops = 2.0 * sizes.positions * sizes.length
    return _case("attention", ops.attention, _heads(sizes), flops)


def linear_attention(sizes: Sizes) -> Case:
    """Linear attention, heads of 64."""
    q, k, v = _heads(sizes)

    def run(q: Tensor, k: Tensor, v: Tensor, *, backend: str) -> Tensor:
        return ops.linear_attention(q, k, v, None, _memory(q), backend=backend)[0]

    return _case("linear_attention", run, (q, k, v), 4.0 * sizes.positions * q.shape[-1])


def gated_delta_rule(sizes: Sizes) -> Case:
    """The rule of Gated DeltaNet, heads of 64."""
    q, k, v = _heads(sizes)
    k = F.normalize(k, dim=-1)
    log_decay, beta = -0.1 * torch.rand_like(q[..., 0]), torch.rand_like(q[..., 0])

    def run(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, backend: str
    ) -> Tensor:
        return ops.gated_delta_rule(q, k, v, log_decay, beta, _memory(q), backend=backend)[0]

    flops = 8.0 * sizes.positions * q.shape[-1]
    return _case("gated_delta_rule", run, (q, k, v, log_decay, beta), flops)


OP_CASES: Mapping[str, Callable[[Sizes], Case]] = {
    "diagonal_ssm": diagonal_ssm,
    "h3_core": h3_core,
    "fft_conv": fft_conv,
    "attention": attention,
    "selective_scan": selective_scan,
    "short_conv": short_conv,
    "linear_attention": linear_attention,
    "gated_delta_rule": gated_delta_rule,
}
