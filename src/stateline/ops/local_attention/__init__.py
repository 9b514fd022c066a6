"""Causal softmax attention to the last few slots, with a bias and keys by distance."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.backend import choose
from stateline.ops.local_attention import pytorch, reference

BACKENDS = {"torch": pytorch, "reference": reference}


def local_attention(  # noqa: PLR0913
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot head d_head"],
    v: Float[Tensor, "batch slot head d_head"],
    *,
    window: int,
    first: Int[Tensor, " batch"] | None = None,
    bias: Float[Tensor, "head window"] | None = None,
    position_keys: Float[Tensor, "window d_head"] | None = None,
    block_len: int | None = None,
    phase: Int[Tensor, " batch"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the slots at and before each query, no further back than the window.

    The last query stands at the last slot: query t at slot :math:`i = S - T + t`, so that S - T
    slots are memory. It attends to slot j if :math:`0 \le i - j < w` and :math:`j \ge f_r`, with
    score

    .. math:: q_i \cdot (k_j + p_{i-j}) / \sqrt d + b_{h, i-j}

    With ``block_len``, windows end where a block begins: a query at place c of its block
    of b sees :math:`i - j \le w - b + c` only. So a window of b is the query's own block up to
    itself, and one of 2 b is that and the whole block before it.

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
        block_len: Length of blocks, no more than the window; ``None``: windows slide.
        phase: For each row, the place of the first query in its block; ``None`` means 0.
        backend: Implementation, by default the fastest.

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        Of two slots that are seen, a large bias picks the one before.

        >>> import torch
        >>> v = torch.arange(4.0).view(1, 4, 1, 1)
        >>> bias = torch.tensor([[0.0, 1000.0]])
        >>> local_attention(v, v, v, window=2, bias=bias).flatten().tolist()
        [0.0, 0.0, 1.0, 2.0]

    References:
        Keys by distance: Shaw et al., "Self-Attention with Relative Position Representations",
        2018; biases by distance: Press et al., 2022 (ALiBi), Raffel et al., 2020 (T5).
    """
    attend = choose("local_attention", BACKENDS, backend).local_attention
    if block_len is not None and phase is None:
        phase = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    k, v = k.to(q.dtype), v.to(q.dtype)
    return attend(q, k, v, window, first, bias, position_keys, phase, block_len or 1)
