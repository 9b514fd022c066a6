"""Causal softmax attention with a window and a linear bias per head."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.bound import Backend, bound
from stateline.ops.containment import Reach, contained
from stateline.ops.declared import Dropout
from stateline.ops.kernel_op import values_at_hand
from stateline.ops.op import Example, Op, Sizes
from stateline.settings import Positive


class AttentionMask(NamedTuple):
    """Which slots a query sees besides the causal mask, and what changes their scores.

    Attributes:
        start: Position of the first query of each row; ``None`` means 0.
        slopes: Slope of the linear bias of each head; ``None`` means no bias.
        windows: Number of positions that each head sees, including the query's own; ``None`` means
            all.
        first: First slot that each query sees, at most its own: where its document begins in a
            packed row; ``None`` means 0.
        soft_cap: Bound c of the scores before the bias: x becomes c tanh(x / c); ``None`` means no
            bound.
    """

    start: Int[Tensor, " batch"] | None = None
    slopes: Float[Tensor, " head"] | None = None
    windows: Int[Tensor, " head"] | None = None
    first: Int[Tensor, "batch length"] | None = None
    soft_cap: Positive | None = None

    @property
    def plain(self) -> bool:
        """Whether every query sees all positions up to its own, and scores stay as they are."""
        return all(part is None for part in self)


PLAIN = AttentionMask()


class AttentionCache(NamedTuple):
    """Keys and values of earlier tokens.

    Attributes:
        k: Keys; slot j holds position j, and the slots after ``length`` are free.
        v: Values.
        length: Number of earlier tokens of each row.
    """

    k: Float[Tensor, "batch slot kv_head d_head"]
    v: Float[Tensor, "batch slot kv_head d_head"]
    length: Int[Tensor, " batch"]


def example(sizes: Sizes) -> Example:
    """Plain causal attention."""
    q, k, v = (sizes.signal(*sizes.heads) for _ in range(3))
    return Example((q, k, v, PLAIN, 0.0), 2.0 * sizes.positions * sizes.length)


OP = Op(__name__, ["numba", "flex"], example)


def heads_and_slots(q: Tensor, k: Tensor) -> str:
    """Why the shapes of queries and keys do not match, or an empty string."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if not kv_heads or heads % kv_heads:
        return f"the heads of keys must divide the heads of queries, got {kv_heads} and {heads}"
    if k.shape[1] < q.shape[1]:
        return f"needs a slot for each query, got {k.shape[1]} slots and {q.shape[1]} queries"
    return ""


def seen(values: Mapping[str, Any], shape: Sequence[int], before: int) -> Reach:  # noqa: ARG001
    """What queries see; of several windows, the widest counts."""
    (start, _, windows, first, _), slots = values["mask"], values["k"].shape[1]
    place = torch.arange(shape[1]).expand(*shape)
    last = (place if start is None else start[:, None] + place).clamp(-1, slots - 1)
    begin = torch.zeros_like(last) if first is None else first
    if windows is not None and len(windows):
        begin = begin.maximum(last - windows.max() + 1)
    return Reach(begin.minimum(last + 1), last)


@bound(OP, heads_and_slots)
@contained(seen)
def attention(
    q: Float[Tensor, "batch length head d_head"],
    k: Float[Tensor, "batch slot kv_head d_head"],
    v: Float[Tensor, "batch slot kv_head d_head"],
    mask: AttentionMask = PLAIN,
    dropout: Dropout = 0.0,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "batch length head d_head"]:
    r"""Attend to the keys at and before each query.

    Slot j of the keys is position j. Query t of row r is position :math:`i = s_r + t`, where s is
    the row's ``start``. Query i attends to slot j if :math:`0 \le i - j < w_h` and
    :math:`j \ge f_{rt}`, with the score
    :math:`q_i \cdot k_j / \sqrt{d} - m_h (i - j)`. Slots after the query do not affect the result;
    they may hold any finite values. With a soft cap c, the score without the bias, x, becomes
    :math:`c \tanh(x / c)`.

    With fewer heads of keys and values than of queries, consecutive heads of queries share one
    (grouped queries); their number must be a multiple.

    Args:
        q: Queries.
        k: Keys, at least as many as queries.
        v: Values.
        mask: Starts s, slopes m, windows w, first slots f and the soft cap c.
        dropout: Probability that a weight is dropped; the others are scaled by 1 / (1 - dropout).

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Example:
        A window of one position copies the value.

        >>> import torch
        >>> v = torch.randn(1, 5, 1, 4)
        >>> torch.equal(attention(v, v, v, AttentionMask(windows=torch.tensor([1]))), v)
        True

    References:
        Vaswani et al., 2017, section 3.2; linear bias: Press et al., 2022 (ALiBi); windows of
        heads: Jelassi et al., 2024 (Hard-ALiBi); grouped queries: Ainslie et al., "GQA", 2023; soft
        cap: Gemma Team, "Gemma 2", 2024.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    return backend(q, k, v, mask, dropout)


def _one_token(q: Tensor, k: Tensor, mask: AttentionMask, frequency: Tensor | None) -> str:
    """Why a token does not fit its cache, or an empty string."""
    if mask.start is not None or mask.first is not None:
        return "the length of the cache is the start, and a row holds one document"
    if frequency is not None and 2 * len(frequency) > q.shape[-1]:
        return f"{len(frequency)} pairs need more than {q.shape[-1]} entries"
    return heads_and_slots(q[:, None], k[:, None])


def check_room(length: Int[Tensor, " batch"], slots: int) -> None:
    """Refuse a step in place if a row has no free slot; lengths on an accelerator are not read."""
    if len(length) and values_at_hand(length):
        least, most = length.aminmax()
        if not 0 <= int(least) <= int(most) < slots:
            raise InputError(
                f"the state has no free slot left (of {slots}): make it with "
                "init_state(batch_size, capacity=n) for n steps in place"
            )


@bound(OP, _one_token)
def attention_step_(
    q: Float[Tensor, "batch head d_head"],
    k: Float[Tensor, "batch kv_head d_head"],
    v: Float[Tensor, "batch kv_head d_head"],
    cache: AttentionCache,
    mask: AttentionMask = PLAIN,
    frequency: Float[Tensor, " pair"] | None = None,
    dropout: Dropout = 0.0,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "batch head d_head"]:
    """Attention of one more token; its key and value go into the cache, which changes in place.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        cache: Keys and values so far, with a free slot in each row.
        mask: Slopes and windows, as in :func:`attention`.
        frequency: With rotary positions, the angle per position of each pair of entries, by which
            queries and keys are rotated: see :func:`stateline.ops.positions.frequencies`.
        dropout: As in :func:`attention`.

    Returns:
        Weighted sums of the values, in the dtype of ``q``.

    Raises:
        InputError: If a shape, a dtype or a device does not fit the others, or no slot is free.
    """
    check_room(cache.length, cache.k.shape[1])
    y: Tensor = backend(q, k, v, cache, mask, frequency, dropout)
    cache.length.add_(1)
    return y
