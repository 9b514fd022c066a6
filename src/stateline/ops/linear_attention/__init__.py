"""Linear attention: whole sequences, chunks and single steps."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_in_place, step_of
from stateline.ops.containment import contained
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.starts import FORGET, Starts, at_starts
from stateline.ops.stepping import zeros_before

CHUNK = 64
"""Tokens of a chunk, which are computed by matrix products."""

SHORT = 16
"""Tokens of a chunk where each entry of a key decays by itself."""


class LinearSignals(NamedTuple):
    """The signals of linear attention.

    Attributes:
        q: Queries, one for each group of adjacent heads.
        k: Keys, one for each group of adjacent heads.
        v: Values.
        log_decay: Logarithm g of the factor by which the state decays before each token, finite
            and at most zero: one per head, or one for each entry of its keys; ``None`` means no
            decay.
    """

    q: Float[Tensor, "batch length group d_key"]
    k: Float[Tensor, "batch length group d_key"]
    v: Float[Tensor, "batch length head d_value"]
    log_decay: Float[Tensor, "batch length head *entry"] | None = None

    def reset(self, starts: Tensor | None) -> "LinearSignals":
        """The signals, with a decay that clears the state at each document's first token."""
        if starts is None:
            return self
        decay = self.v.new_zeros(self.v.shape[:3]) if self.log_decay is None else self.log_decay
        return self._replace(log_decay=at_starts(decay, starts, FORGET))

    @property
    def decays_by_entry(self) -> bool:
        """Whether each entry of a key decays by itself."""
        return self.log_decay is not None and self.log_decay.ndim == self.v.ndim

    def with_own_keys(self) -> "LinearSignals":
        """The same with queries and keys for every head."""
        each = self.v.shape[-2] // self.q.shape[-2]
        q, k = (t.repeat_interleave(each, dim=-2) if each > 1 else t for t in (self.q, self.k))
        return self._replace(q=q, k=k)


def example(sizes: Sizes) -> Example:
    """Without decay."""
    count, width = sizes.heads
    signals = LinearSignals(*(sizes.signal(count, width) for _ in "qkv"))
    return Example((signals,), 4.0 * sizes.positions * width)


OP = Op(__name__, ["numba", "fla"], example)


def _decay_fits(x: LinearSignals) -> str:
    """Why the decays fit neither the heads nor the entries of their keys, or an empty string."""
    entries = () if x.log_decay is None else tuple(x.log_decay.shape[x.k.ndim - 1 :])
    if entries in ((), (x.k.shape[-1],)):
        return ""
    return (
        "log_decay must have one entry per head, or one for each of the "
        f"{x.k.shape[-1]} entries of a key, got entries of shape {entries}"
    )


def _groups_divide(x: LinearSignals) -> str:
    """Why the groups do not fit the heads, or an empty string."""
    groups, heads = x.q.shape[-2], x.v.shape[-2]
    if groups and heads % groups == 0:
        return ""
    return f"the groups of queries and keys must divide the heads, got {groups} and {heads}"


@bound(OP, _groups_divide, _decay_fits, autocast=False)
@contained()
def linear_attention(
    x: LinearSignals,
    state: Float[Tensor, "batch head d_key d_value"] | None = None,
    *,
    starts: Starts | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""Write values at keys into one matrix S per head, and read them by queries.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad y_t = S_t^\top q_t

    Without the decay g, this is causal attention without the softmax. With one g per head, this is
    the state space model of Mamba-2, where q, k and v are called C, B and x (times the step). With
    a vector g per head, each entry of the keys has a decay of its own, as in gated linear
    attention: row i of S is multiplied by :math:`e^{g_{t,i}}`. Computed in the dtype of the state.

    Args:
        x: Queries q, keys k, values v and logarithms g of the decays.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Example:
        >>> import torch
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        >>> y, state = linear_attention(LinearSignals(one, one, v))
        >>> y.flatten()
        tensor([1., 3., 7.])

    References:
        Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3; Dao and Gu,
        "Transformers are SSMs", ICML 2024, section 6; Yang et al., "Gated Linear Attention
        Transformers with Hardware-Efficient Training", ICML 2024, section 4.
    """
    if state is None:
        state = zeros_before(x.v, len(x.v), x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return backend(x, state, starts=starts)


linear_attention_step = step_of(OP, linear_attention)
linear_attention_step_ = step_in_place(OP, linear_attention)
