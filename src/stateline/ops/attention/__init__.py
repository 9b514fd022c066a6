"""Causal softmax attention with windows and linear biases per head."""

from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.attention import pytorch, reference
from stateline.ops.backend import choose

BACKENDS = {"torch": pytorch, "reference": reference}


def attention(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot head d_head"],
    v: Float[Tensor, "batch slot head d_head"],
    start: Int[Tensor, " batch"] | None = None,
    *,
    slopes: Float[Tensor, " head"] | None = None,
    windows: Int[Tensor, " head"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the keys at and before each query.

    Slot j of the keys is position j, and query t of row r is position :math:`i = s_r + t` with the
    row's ``start`` s. Query i attends to slot j if :math:`0 \le i - j < w_h`, with score
    :math:`q_i \cdot k_j / \sqrt{d} - m_h (i - j)`. Slots after the query are never looked at: they
    may hold anything finite.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        start: Position of the first query of each row; ``None`` means 0.
        slopes: Slope m of the linear bias of each head; ``None`` means no bias.
        windows: How many positions each head sees, itself included; ``None`` means all.
        backend: Implementation, by default the fastest.

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        A window of one position copies the value.

        >>> import torch
        >>> v = torch.randn(1, 5, 1, 4)
        >>> torch.equal(attention(v, v, v, windows=torch.tensor([1])), v)
        True
    """
    attend = choose("attention", BACKENDS, backend).attention
    return attend(q, k.to(q.dtype), v.to(q.dtype), start, slopes, windows)
