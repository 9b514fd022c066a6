"""Causal softmax attention with a window and a linear bias per head."""

from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.attention import pytorch, reference
from stateline.ops.dispatch import dispatch
from stateline.ops.op import Op

OP = Op(
    "attention",
    {
        "numba": "stateline.ops.attention.numba_backend",
        "flex": "stateline.ops.attention.flex_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def attention(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot kv_head d_head"],
    v: Float[Tensor, "batch slot kv_head d_head"],
    start: Int[Tensor, " batch"] | None = None,
    *,
    slopes: Float[Tensor, " head"] | None = None,
    windows: Int[Tensor, " head"] | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the keys at and before each query.

    Slot j of the keys is position j. Query t of row r is position :math:`i = s_r + t`, where s is
    the row's ``start``. Query i attends to slot j if :math:`0 \le i - j < w_h`, with the score
    :math:`q_i \cdot k_j / \sqrt{d} - m_h (i - j)`. Slots after the query do not affect the result;
    they may hold any finite values.

    With fewer heads of keys and values than of queries, consecutive heads of queries share one
    (grouped queries); their number must be a multiple.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        start: Position of the first query of each row; ``None`` means 0.
        slopes: Slope m of the linear bias of each head; ``None`` means no bias.
        windows: Number of positions that each head sees, including the query's own; ``None`` means
            all.
        dropout: Chance that a weight is dropped, and the others are scaled by 1 / (1 - dropout).
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        A window of one position copies the value.

        >>> import torch
        >>> v = torch.randn(1, 5, 1, 4)
        >>> torch.equal(attention(v, v, v, windows=torch.tensor([1])), v)
        True
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    inputs = (q, k, v, start, slopes, windows)
    if dropout:
        return dispatch(OP, "attention_with_dropout", *inputs, dropout, backend=backend)
    return dispatch(OP, "attention", *inputs, backend=backend)
