"""Causal softmax attention in a window, with biases and keys by distance."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.ops.attention import heads_and_slots
from stateline.ops.bound import Backend, bound
from stateline.ops.containment import Reach, contained
from stateline.ops.declared import Dropout
from stateline.ops.op import Example, Op, Sizes
from stateline.settings import Count, Positive


class LocalWindow(NamedTuple):
    """The slots that a query of local attention sees, and what changes their scores.

    Attributes:
        size: Number of slots, including the query's own.
        first: First valid slot of each row; ``None`` means 0.
        bias: Bias by head and distance.
        position_keys: Keys by distance, shared by all heads.
        block_len: Length of the blocks, at most the size; ``None`` means sliding windows.
        phase: Offset of each row's first query in its block; ``None`` means 0.
        soft_cap: Bound c of the scores before the bias: x becomes c tanh(x / c); ``None`` means no
            bound.
    """

    size: Count
    first: Int[Tensor, " batch"] | None = None
    bias: Float[Tensor, "head window"] | None = None
    position_keys: Float[Tensor, "window d_head"] | None = None
    block_len: Count | None = None
    phase: Int[Tensor, " batch"] | None = None
    soft_cap: Positive | None = None


def example(sizes: Sizes) -> Example:
    """A sliding window of 128 positions."""
    q, k, v = (sizes.signal(*sizes.heads) for _ in range(3))
    return Example((q, k, v, LocalWindow(128), 0.0), 4.0 * sizes.positions * 128)


OP = Op(__name__, ["numba", "flex"], example)


def _window_fits(window: LocalWindow) -> str:
    """An error in the sizes of a window, or an empty string."""
    size, _, bias, keys, block_len, *_ = window
    if block_len is not None and block_len > size:
        return f"window.block_len must be at most window.size = {size}, got {block_len}"
    tables = {len(keys)} if keys is not None else set()
    tables |= {bias.shape[1]} if bias is not None else set()
    if tables - {size}:
        return f"bias and position_keys need window.size = {size} distances, got {tables}"
    return ""


def seen(values: Mapping[str, Any], shape: Sequence[int], before: int) -> Reach:  # noqa: ARG001
    """What queries see; blocks count as sliding windows."""
    window, slots = values["window"], values["k"].shape[1]
    last = torch.arange(slots - shape[1], slots).expand(*shape)
    begin = (last - window.size + 1).clamp(min=0)
    if window.first is not None:
        begin = begin.maximum(window.first[:, None])
    return Reach(begin.minimum(last + 1), last)


@bound(OP, heads_and_slots, _window_fits)
@contained(seen)
def local_attention(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot kv_head d_head"],
    v: Float[Tensor, "batch slot kv_head d_head"],
    window: LocalWindow,
    dropout: Dropout = 0.0,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the slots at and before each query, inside a window.

    The queries are at the last T of S slots: query t is at slot :math:`i = S - T + t`; the first
    S - T slots are memory. Query i attends to slot j if :math:`0 \le i - j < w` and
    :math:`j \ge f_r`, with the score

    .. math:: q_i \cdot (k_j + p_{i-j}) / \sqrt d + b_{h, i-j}

    With a soft cap c, the first term x becomes :math:`c \tanh(x / c)`.

    With ``block_len`` b, windows start at block boundaries: a query at offset c of its block also
    needs :math:`i - j \le w - b + c`. A window of b covers the query's own block up to the query;
    a window of 2 b covers the previous block, too.

    A query that sees no slot returns zero. Slots outside the window may hold any finite values.
    Time and memory are linear in the length. With fewer heads of keys and values than of queries,
    consecutive heads of queries share one (grouped queries); their number must be a multiple.

    Args:
        q: Queries.
        k: Keys, at least as many as queries.
        v: Values.
        window: Size w, first slots f, biases b, keys by distance p, length and phase of blocks, and
            the soft cap c.
        dropout: Probability that a weight is dropped; the others are scaled by 1 / (1 - dropout).

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        In a window of two slots, a large bias selects the previous one.

        >>> import torch
        >>> v = torch.arange(4.0).view(1, 4, 1, 1)
        >>> bias = torch.tensor([[0.0, 1000.0]])
        >>> local_attention(v, v, v, LocalWindow(2, bias=bias)).flatten().tolist()
        [0.0, 0.0, 1.0, 2.0]

    References:
        Keys by distance: Shaw et al., "Self-Attention with Relative Position Representations",
        2018; biases by distance: Press et al., 2022 (ALiBi), Raffel et al., 2020 (T5).
    """
    if window.block_len is not None and window.phase is None:
        phase = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
        window = window._replace(phase=phase)
    k, v = k.to(q.dtype), v.to(q.dtype)
    return backend(q, k, v, window, dropout)
