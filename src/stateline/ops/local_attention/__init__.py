"""Causal softmax attention to the last few slots, with a bias and keys by distance."""

from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.backend import choose
from stateline.ops.local_attention import pytorch, reference

BACKENDS = {"torch": pytorch, "reference": reference}


def local_attention(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot head d_head"],
    v: Float[Tensor, "batch slot head d_head"],
    *,
    window: int,
    first: Int[Tensor, " batch"] | None = None,
    bias: Float[Tensor, "head window"] | None = None,
    position_keys: Float[Tensor, "window d_head"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the slots at and before each query, no further back than the window.

    The last query stands at the last slot: query t at slot :math:`i = S - T + t`, so that S - T
    slots are memory. It attends to slot j if :math:`0 \le i - j < w` and :math:`j \ge f_r`, with
    score

    .. math:: q_i \cdot (k_j + p_{i-j}) / \sqrt d + b_{h, i-j}

    A query that sees no slot gets zero. Slots that are not seen may hold anything finite. Time and
    memory are linear in the length.

    Args:
        q: Queries.
        k: Keys, at least as many as queries.
        v: Values.
        window: How many slots a query sees, its own included.
        first: For each row, the first slot f that holds something; ``None`` means 0.
        bias: Bias b by head and distance.
        position_keys: Keys p by distance, the same for all heads.
        backend: Implementation, by default the fastest.

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        Of two slots that are seen, a large bias picks the one before.

        >>> import torch
        >>> v = torch.arange(4.0).view(1, 4, 1, 1)
        >>> bias = torch.tensor([[0.0, 100.0]])
        >>> local_attention(v, v, v, window=2, bias=bias).flatten().tolist()
        [0.0, 0.0, 1.0, 2.0]

    References:
        Keys by distance: Shaw et al., "Self-Attention with Relative Position Representations",
        2018; biases by distance: Press et al., 2022 (ALiBi), Raffel et al., 2020 (T5).
    """
    attend = choose("local_attention", BACKENDS, backend).local_attention
    return attend(q, k.to(q.dtype), v.to(q.dtype), window, first, bias, position_keys)
