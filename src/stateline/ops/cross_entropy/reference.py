"""The definition of the cross entropy: its formula."""

from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Evaluate the formula."""
    scored = targets >= 0
    rows, wanted = logits[scored], targets[scored]
    return (rows.logsumexp(dim=-1) - rows.gather(-1, wanted[:, None])[:, 0]).sum()
