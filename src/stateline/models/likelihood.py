"""Log-likelihoods of tokens, in nats, to the precision of the logits.

A softmax of PyTorch in float32 sums up to a bias of 1e-5 nats per token where a vocabulary of
262,144 tokens is the last axis, and of 5e-4 where it is not. ``logsumexp`` has errors of 2e-6.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE = -100
"""Target of a position that no loss or score counts (``ignore_index`` in PyTorch)."""


def log_probabilities(logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """Log-probabilities of all tokens, in float32 or better.

    Example:
        >>> log_probabilities(torch.zeros(2))
        tensor([-0.6931, -0.6931])
    """
    logits = _precise(logits)
    return logits - logits.logsumexp(dim=-1, keepdim=True)


def token_losses(
    logits: Float[Tensor, "*rows vocab"], targets: Int[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Negative log-likelihood of each target in nats, in float32 or better; 0 where ignored.

    Raises:
        IndexError: If a target on the CPU is neither a token nor ``IGNORE``.

    Example:
        >>> token_losses(torch.zeros(3, 2), torch.tensor([0, 1, IGNORE]))
        tensor([0.6931, 0.6931, 0.0000])
    """
    losses: Tensor = _TokenLosses.apply(logits.flatten(0, -2), targets.flatten())
    return losses.view(targets.shape)


class _TokenLosses(torch.autograd.Function):
    """Saves the logits as they are, and one number for each row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        precise = _precise(logits)
        total = precise.logsumexp(dim=-1)
        ctx.save_for_backward(logits, total, targets)
        chosen = F.nll_loss(precise, targets, ignore_index=IGNORE, reduction="none")
        return chosen + total.masked_fill(targets == IGNORE, 0)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        logits, total, targets = ctx.saved_tensors
        precise, asked = _precise(logits), targets != IGNORE
        place, grads = targets.where(asked, 0)[:, None], (grads * asked)[:, None]
        if torch.is_grad_enabled():  # to be differentiated again
            found = precise.softmax(dim=-1) * grads
        else:
            found = (precise - total[:, None]).exp_().mul_(grads)
        return found.scatter_add_(-1, place, -grads).to(logits.dtype), None


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
