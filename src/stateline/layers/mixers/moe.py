"""Mixture of experts: each position passes through the few feed-forwards that a router chooses."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.keywords import check_choice, check_counts
from stateline.layers.linear import Linear
from stateline.layers.mixers.feed_forward import (
    FeedForward,
    Positionwise,
    activated,
    default_hidden,
)
from stateline.ops.grouped_linear import grouped_linear

Activation = Literal["swiglu", "geglu", "relu2", "gelu"]


class MoE(Positionwise):
    r"""A feed-forward whose hidden units are divided among experts, of which few are used.

    .. math::
        p = \mathrm{softmax}(W_r x), \qquad
        y = \sum_{i \in T} \frac{p_i}{\sum_{j \in T} p_j}\, f_i(x) + f_0(x)

    where T are the ``top_k`` experts of largest p, and each :math:`f_i` is a feed-forward;
    :math:`f_0`, which all positions use, is there if ``shared`` is positive. No position is
    dropped, however many choose the same expert, so every position is computed by itself, as in a
    step. Scores are computed in float32 at least.

    In training, the gradient is that of the loss plus ``balance`` times

    .. math:: \frac{E}{k\,n} \sum_{i=1}^E c_i \cdot \frac{1}{n} \sum_{t=1}^n p_{t,i}

    for E experts and n positions, of which :math:`c_i` use expert i. It is 1 where all experts are
    used equally.

    Args:
        d_model: Width of input and output.
        experts: Number of experts E.
        top_k: Number k of experts that a position uses.
        shared: Hidden width of :math:`f_0`, in units of ``d_hidden``.
        activation: Activation of the experts, as in a feed-forward.
        d_hidden: Hidden width of an expert; by default that of a feed-forward, divided by
            ``top_k`` and rounded up to a multiple of 8.
        normalise: Whether the weights of the chosen experts are divided by their sum.
        balance: Factor of the loss that balances the experts.

    Raises:
        InputError: If the activation is unknown, a size is not positive, ``top_k`` exceeds
            ``experts``, or ``shared`` or ``balance`` is negative.

    References:
        Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017; the loss: Fedus et al.,
        "Switch Transformers", JMLR 2022, equations 4 to 6; ``shared``: Dai et al., "DeepSeekMoE",
        2024; without dropping: Gale et al., "MegaBlocks", MLSys 2023.
    """

    def __init__(
        self,
        d_model: int,
        *,
        experts: int = 8,
        top_k: int = 2,
        shared: int = 0,
        activation: Activation = "swiglu",
        d_hidden: int | None = None,
        normalise: bool = True,
        balance: float = 0.01,
    ) -> None:
        super().__init__(d_model)
        check_choice("activation", activation, get_args(Activation))
        check_counts(experts=experts, top_k=top_k)
        if d_hidden is None:
            d_hidden = -(-default_hidden(d_model, activation) // (8 * top_k)) * 8
        check_counts(d_hidden=d_hidden)
        if top_k > experts or shared < 0 or balance < 0:
            raise InputError(
                "top_k must be at most experts, and shared and balance at least 0, got "
                f"{top_k=}, {experts=}, {shared=} and {balance=}"
            )
        self.experts, self.top_k, self.d_hidden = experts, top_k, d_hidden
        self.activation, self.shared = activation, shared
        self.normalise, self.balance = normalise, balance
        self.router = Linear(d_model, experts, bias=False)
        one = FeedForward(d_model, activation=activation, d_hidden=d_hidden, bias=False)
        self.in_weight = nn.Parameter(_drawn(d_model, experts, *one.in_proj.weight.shape))
        self.out_weight = nn.Parameter(_drawn(d_model, experts, *one.out_proj.weight.shape))
        self.always = None
        if shared:
            width = shared * d_hidden
            self.always = FeedForward(d_model, activation=activation, d_hidden=width, bias=False)
        self.share = 1.0  # of a call in the loss that balances, where an update has several calls

    def _forward(self, x: Tensor, **_: Any) -> Tensor:
        rows = x.reshape(-1, self.d_model)
        scores = self.router(rows)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts = torch.arange(self.experts, device=x.device)
        counts = (chosen.flatten()[:, None] == experts).sum(dim=0)
        order = chosen.flatten().argsort(stable=True)  # positions in the order of their experts
        hidden = grouped_linear(rows[order // self.top_k], self.in_weight, counts)
        found = grouped_linear(activated(hidden, self.activation), self.out_weight, counts)
        found = found[order.argsort()].unflatten(0, (-1, self.top_k))
        y = (weights.to(found.dtype)[..., None] * found).sum(dim=1)
        if self.training and torch.is_grad_enabled() and self.balance and len(rows):
            used = counts / counts.sum()
            y = _AddsLoss.apply(y, self.share * self.balance * self._unbalance(used, scores))
        y = y.to(x.dtype).view(x.shape)
        return y if self.always is None else y + self.always(x)

    def _unbalance(self, used: Tensor, scores: Tensor) -> Tensor:
        """The loss that balances, from the part of each expert and the scores."""
        return self.experts * (used * scores.mean(dim=0)).sum()

    def flops_per_token(self, length: int) -> float:
        """The router, the chosen experts, and the shared one."""
        each = self.in_weight[0].numel() + self.out_weight[0].numel()
        return super().flops_per_token(length) + 2.0 * self.top_k * each


class _AddsLoss(torch.autograd.Function):
    """Outputs as they are; their gradient is that of the loss of the model plus another loss."""

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
