"""Mixture of experts: each position passes through the few feed-forwards that a router chooses."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.linear import Linear
from stateline.layers.mixers.feed_forward import (
    FeedForward,
    Positionwise,
    activated,
    default_hidden,
)
from stateline.ops.grouped_linear import grouped_linear
from stateline.settings import Choice, Count, NotNegative, Settings, Size

Activation = Literal["swiglu", "geglu", "relu2", "gelu"]
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Expert(Choice):
    r"""The expert :math:`f_0` that all positions use.

    Attributes:
        d_hidden: Its hidden width.
        gate: Whether :math:`f_0(x)` is multiplied by :math:`\sigma(w \cdot x)`.
    """

    owner = "expert"
    d_hidden: Count = 256
    gate: bool = False


@dataclass(frozen=True, kw_only=True)
class MoESettings(Settings):
    r"""Settings of :class:`~stateline.layers.MoE`, with its symbols.

    Attributes:
        experts: Number of experts E.
        top_k: Number k of experts that a position uses.
        shared: :math:`f_0`: its hidden width in units of ``d_hidden``, or an :class:`Expert`.
        activation: Activation of the experts, as in a feed-forward.
        d_hidden: Hidden width of an expert; by default that of a feed-forward, divided by
            ``top_k`` and rounded up to a multiple of 8.
        scores: How p follows from :math:`W_r x`: by a softmax, or entry by entry by a sigmoid.
        correction: Whether T are the experts of largest :math:`p_i + b_i`, where b (a buffer)
            begins at zero.
        correction_rate: The rate u: after each update, training adds
            :math:`u \,\mathrm{sign}(\bar c - c_i)` to :math:`b_i`, where :math:`c_i` positions of
            the update use expert i, and :math:`\bar c` on average. 0 leaves b as it is.
        normalise: Whether the weights of the chosen experts are divided by their sum.
        normalise_eps: Added to this sum.
        scale: The factor :math:`\alpha`.
        balance: Factor of the loss that balances the experts.
    """

    experts: Count = 8
    top_k: Count = 2
    shared: Size | Expert = 0
    activation: Activation = "swiglu"
    d_hidden: Count | None = None
    scores: Scores = "softmax"
    correction: bool = False
    correction_rate: NotNegative = 0.001
    normalise: bool = True
    normalise_eps: NotNegative = 0.0
    scale: float = 1.0
    balance: NotNegative = 0.01

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise InputError(
                f"top_k must be at most experts, got top_k={self.top_k}, experts={self.experts}"
            )

    def widths(self, d_model: int) -> tuple[int, int]:
        """Hidden widths of an expert and of the shared expert."""
        width = self.d_hidden
        if width is None:
            width = -(-default_hidden(d_model, self.activation) // (8 * self.top_k)) * 8
        return width, self.shared.d_hidden if isinstance(
            self.shared, Expert
        ) else self.shared * width


class MoE(Positionwise):
    r"""A feed-forward whose hidden units are divided among experts, of which few are used.

    .. math::
        p = \mathrm{softmax}(W_r x), \qquad
        y = \alpha \sum_{i \in T} \frac{p_i}{\sum_{j \in T} p_j}\, f_i(x) + f_0(x)

    where T are the ``top_k`` experts of largest p, and each :math:`f_i` is a feed-forward;
    :math:`f_0`, which all positions use, is there if ``shared`` is not 0. No
    position is dropped, however many choose the same expert, so every position is computed by
    itself, as in a step. Scores are computed in float32 at least.

    In training, the gradient is that of the loss plus ``balance`` times

    .. math:: \frac{E}{k\,n} \sum_{i=1}^E c_i \cdot
        \frac{1}{n} \sum_{t=1}^n \frac{p_{t,i}}{\sum_{j=1}^E p_{t,j}}

    for E experts and n positions, of which :math:`c_i` use expert i. It is 1 where all experts are
    used equally. If an update calls the layer several times, each call adds such a loss, weighted
    by its share of the update's positions.

    Args:
        d_model: Width of input and output.
        **settings: See :class:`~stateline.layers.mixers.moe.MoESettings`.

    Raises:
        InputError: If the activation or the kind of scores is unknown, a size is not positive,
            ``top_k`` exceeds ``experts``, or ``shared``, ``balance`` or ``correction_rate`` is
            negative.

    Attributes:
        uses: A vector that requires a gradient, or ``None``. A backward pass adds to its gradient
            the number of positions that use each expert; :meth:`correct` takes this gradient.

    References:
        Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017; the loss: Fedus et al.,
        "Switch Transformers", JMLR 2022, equations 4 to 6, for sigmoids as in DeepSeek-AI,
        "DeepSeek-V3 Technical Report", 2024, equations 17 to 20; ``shared``: Dai et al.,
        "DeepSeekMoE", 2024; without dropping: Gale et al., "MegaBlocks", MLSys 2023;
        ``gate``: Qwen team, "Qwen1.5-MoE", 2024; ``correction``: Wang et al.,
        "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, section 3.
    """

    chooses: ClassVar[bool] = True
    """Small changes of an input may change which experts are used, and so much of the output."""

    maps: ClassVar[tuple[str, ...]] = ("in_weight", "out_weight")
    balances: ClassVar[bool] = True
    settings: MoESettings
    correction: Tensor | None

    def __init__(self, d_model: int, **settings: Any) -> None:
        super().__init__(d_model, **settings)
        its, (self.d_hidden, self.d_shared) = self.settings, self.settings.widths(d_model)
        self.experts, self.top_k, self.activation = its.experts, its.top_k, its.activation
        self.router = Linear(d_model, its.experts, bias=False)
        feed_forward = partial(FeedForward, d_model, activation=its.activation, bias=False)
        one = feed_forward(d_hidden=self.d_hidden)
        self.in_weight = nn.Parameter(_drawn(d_model, its.experts, *one.in_proj.weight.shape))
        self.out_weight = nn.Parameter(_drawn(d_model, its.experts, *one.out_proj.weight.shape))
        self.register_buffer("correction", torch.zeros(its.experts) if its.correction else None)
        self.always = feed_forward(d_hidden=self.d_shared) if self.d_shared else None
        self.gate = Linear(d_model, 1, bias=False) if getattr(its.shared, "gate", False) else None
        self.positions: int | None = None  # of an update; by default, of each call
        self.uses: Tensor | None = None

    @override
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        its, rows = self.settings, x.reshape(-1, self.d_model)
        scores = self.router(rows)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.softmax(dim=-1) if its.scores == "softmax" else scores.sigmoid()
        ranked = scores if self.correction is None else scores + self.correction
        chosen = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if its.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + its.normalise_eps)
        if its.scale != 1:
            weights = its.scale * weights
        experts = torch.arange(self.experts, device=x.device)
        counts = (chosen.flatten()[:, None] == experts).sum(dim=0)
        order = chosen.flatten().argsort(stable=True)  # positions in the order of their experts
        hidden = grouped_linear(rows[order // self.top_k], self.in_weight, counts)
        hidden = activated(hidden, self.activation, decodes=self.decodes)
        found = grouped_linear(hidden, self.out_weight, counts)
        found = found[order.argsort()].unflatten(0, (-1, self.top_k))
        y = (weights.to(found.dtype)[..., None] * found).sum(dim=1)
        if self.training and torch.is_grad_enabled() and its.balance and len(rows):
            used, share = counts / counts.sum(), len(rows) / (self.positions or len(rows))
            shares = normalize(scores, p=1, dim=-1).mean(dim=0)
            unbalance = self.experts * (used * shares).sum()
            y = _AddsLoss.apply(y, share * its.balance * unbalance)
        if self.training and self.uses is not None:
            y = _AddsLoss.apply(y, (counts * self.uses).sum())
        y = y.to(x.dtype).view(x.shape)
        if self.always is None:
            return y
        always = self.always(x)
        return y + (always if self.gate is None else self.gate(x).sigmoid() * always)

    def new_uses(self) -> Tensor | None:
        """Zeros for :attr:`uses`; ``None`` if training does not correct the router."""
        if self.correction is None or not self.router.weight.requires_grad:
            return None
        return torch.zeros_like(self.correction, requires_grad=True)

    @torch.no_grad()
    def correct(self, uses: Tensor) -> None:
        """Change the corrections after an update in which ``uses`` positions used each expert."""
        assert self.correction is not None
        self.correction += self.settings.correction_rate * (uses.mean() - uses).sign()

    def flops_per_token(self, length: int) -> float:
        """The router, the chosen experts, and the shared one."""
        each = self.in_weight[0].numel() + self.out_weight[0].numel()
        return super().flops_per_token(length) + 2.0 * self.top_k * each


class _AddsLoss(torch.autograd.Function):
    """Passes outputs through; the backward pass adds another loss to the loss of the model."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=ctx.like, device=grad.device)


def _drawn(d_model: int, *shape: int) -> Tensor:
    """Initial weights, as linear maps of a model have them by default."""
    return (2 / (5 * d_model)) ** 0.5 * torch.randn(shape)
