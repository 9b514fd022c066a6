"""RG-LRU: a gated diagonal recurrence between a convolution and a gate."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, accumulates, records, zeros
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents, count_positions, mask_of
from stateline.layers.linear import Linear
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.gated_conv import PlainConv
from stateline.ops import ScanSignals, selective_scan, selective_scan_step, selective_scan_step_
from stateline.settings import Count

_SHARPNESS = 8.0
"""The constant c of the paper: a state decays at most c times as fast as by its own rate."""

_SLOWEST = 1e-15
"""Smallest rate -log a: gradients divide inputs by its square, which must not overflow."""


@accumulates("h")
class RGLRUState(NamedTuple):
    """States of the convolution and of every channel, and the number of tokens so far."""

    conv: FiniteFilterState
    h: Float[Tensor, "batch d_inner"]
    length: Int[Tensor, " batch"]


class RGLRU(SequenceLayer[RGLRUState]):
    r"""Real-gated linear recurrent unit, in the recurrent block of Griffin.

    .. math::
        (z, u) = W_{\mathrm{in}} x + b, \qquad u \leftarrow \mathrm{conv}(u), \qquad
        r, i = \sigma(W_r u + b_r), \sigma(W_i u + b_i)

    .. math::
        a_t = \exp(-8\, r_t \odot \mathrm{softplus}(\lambda)), \quad
        h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot i_t \odot u_t, \quad
        y = W_{\mathrm{out}} (h \odot \mathrm{gelu}(z))

    At the first token, 1 replaces the root. The maps of the two gates are block-diagonal, a block
    for each head. Gates, filter and state stay float32 under a cast to half precision.

    Args:
        d_model: Width of input and output.
        d_inner: Number of channels; by default ``d_model``.
        n_heads: Number of blocks in the maps of the gates; must divide ``d_inner``.
        d_conv: Taps of the convolution.

    Raises:
        InputError: If a size is not positive, or the heads do not divide the channels.

    References:
        De et al., "Griffin", 2024, section 2.4; first token and signs as in RecurrentGemma.
        Initial decays as in the paper: where r is 1, a is uniform from 0.9 to 0.999. In
        RecurrentGemma, the eighth root of a is in this range, so half of the channels begin with
        a below 0.67; its filter begins smaller, too.
    """

    keeps_float32 = True
    optimizer_groups: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("rate", "decay_bias", "input_bias"), "no_decay"
    )

    def __init__(
        self, d_model: int, *, d_inner: Count | None = None, n_heads: Count = 4, d_conv: Count = 4
    ) -> None:
        super().__init__(d_model)
        self.d_inner = d_model if d_inner is None else d_inner
        if self.d_inner % n_heads:
            raise InputError(f"n_heads must divide d_inner, got {n_heads=}, d_inner={self.d_inner}")
        self.n_heads, self.d_conv, width = n_heads, d_conv, self.d_inner // n_heads
        self.in_proj = Linear(d_model, [self.d_inner] * 2)
        self.conv = PlainConv(self.d_inner, taps=d_conv)
        blocks = (n_heads, width, width)
        self.decay_weight = nn.Parameter(torch.randn(blocks) * width**-0.5)
        self.decay_bias = nn.Parameter(torch.zeros(n_heads, width))
        self.input_weight = nn.Parameter(torch.randn(blocks) * width**-0.5)
        self.input_bias = nn.Parameter(torch.zeros(n_heads, width))
        fastest = torch.empty(self.d_inner).uniform_(0.9, 0.999)  # of a where r is 1
        self.rate = nn.Parameter((-fastest.log() / _SHARPNESS).expm1().log())
        self.out_proj = Linear(self.d_inner, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> RGLRUState:  # noqa: ARG002
        """Zero states."""
        h = zeros(self.rate, batch_size, self.d_inner)
        length = torch.zeros(batch_size, dtype=torch.int64, device=h.device)
        return RGLRUState(self.conv.init_state(batch_size), h, length)

    @override
    def forward_chunk(
        self, x: Tensor, state: RGLRUState, starts: Documents | None = None
    ) -> tuple[Tensor, RGLRUState]:
        z, u = self.in_proj(x).chunk(2, dim=-1)
        u, conv = self.conv.forward_chunk(u, state.conv, starts=starts)
        position, length = count_positions(state.length, x, starts)
        signals = self._signals(u, position)
        y, h = selective_scan(*signals, state.h[..., None], starts=mask_of(starts))
        return self._read(y, z), RGLRUState(conv, h[..., 0], length)

    @override
    def step(self, x: Tensor, state: RGLRUState) -> tuple[Tensor, RGLRUState]:
        z, u = self.in_proj(x).chunk(2, dim=-1)
        u, conv = self.conv.step(u, state.conv)
        y, h = selective_scan_step(*self._signals(u, state.length), state.h[..., None])
        return self._read(y, z), RGLRUState(conv, h[..., 0], state.length + 1)

    @override
    def step_(self, x: Tensor, state: RGLRUState) -> Tensor:
        if not self.decodes and records(x):
            return super().step_(x, state)
        z, u = self.in_proj(x).chunk(2, dim=-1)
        signals = self._signals(self.conv.step_(u, state.conv), state.length)
        y = selective_scan_step_(*signals, state.h[..., None])
        state.length.add_(1)
        return self._read(y, z)

    def flops_per_token(self, length: int) -> float:
        """Maps, gates, convolution, and about 10 operations per channel."""
        gates = 4.0 * self.decay_weight.numel() + 10.0 * self.d_inner
        return super().flops_per_token(length) + gates

    @prepared
    def rates(self) -> Float[Tensor, " d_inner"]:
        """Rate -log a at which each channel decays where its gate r is 1."""
        return _SHARPNESS * F.softplus(self.rate)

    def _signals(self, u: Tensor, position: Tensor) -> tuple[ScanSignals, Tensor]:
        """Signals and transition of a scan with one state per channel and A = -1.

        The steps of the scan are the rates -log a. The scan multiplies its input by the step, so
        the input is divided by it here.
        """
        heads = u.to(self.rate.dtype).unflatten(-1, (self.n_heads, -1))
        r, i = (
            (torch.einsum("...hi,hij->...hj", heads, weight) + bias).sigmoid().flatten(-2)
            for weight, bias in (
                (self.decay_weight, self.decay_bias),
                (self.input_weight, self.input_bias),
            )
        )
        decay = (r * self.rates()).clamp(min=_SLOWEST)
        root = (-torch.expm1(-2 * decay)).sqrt()
        root = torch.where(position[..., None] == 0, 1.0, root)
        v = root * i * u / decay
        ones = torch.ones_like(v[..., :1, None])
        return ScanSignals(v, decay, ones, ones), -torch.ones_like(self.rate)[:, None]

    def _read(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj((y * F.gelu(z, approximate="tanh")).to(z.dtype))
