"""The definition of the feed-forward: its formula."""

from torch import Tensor

from stateline.ops.gelu.reference import gelu


def feed_forward(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """Evaluate the formula."""
    return gelu(x @ w_in.T + b_in) @ w_out.T + b_out
