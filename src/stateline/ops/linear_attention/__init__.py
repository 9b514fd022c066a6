r"""Linear attention: one matrix per head; keys write values into it, queries read them.

.. math:: S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad y_t = S_t^\top q_t

Without the decay g, this is causal attention without the softmax. With one g per head, this is the
state space model of Mamba-2, where q, k and v are called C, B and x (times the step). With a vector
g per head, each entry of the keys has a decay of its own, as in gated linear attention: row i of S
is multiplied by :math:`e^{g_{t,i}}`.

References:
    Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3; Dao and Gu,
    "Transformers are SSMs", ICML 2024, section 6; Yang et al., "Gated Linear Attention Transformers
    with Hardware-Efficient Training", ICML 2024, section 4.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.door import door
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.stepping import step_in_place, step_of, zeros_before

CHUNK = 64
"""Tokens of a chunk, which are computed by matrix products."""


def example(sizes: Sizes) -> Example:
    """Without decay."""
    count, width = sizes.heads
    return Example(tuple(sizes.signal(count, width) for _ in "qkv"), 4.0 * sizes.positions * width)


OP = Op(
    "linear_attention",
    {
        "numba": f"{__name__}.numba_backend",
        "fla": f"{__name__}.fla_backend",
        "torch": f"{__name__}.pytorch",
        "reference": f"{__name__}.reference",
    },
    example,
)


def decay_fits(log_decay: Tensor | None, k: Tensor) -> str:
    """Why the decays fit neither the heads nor the entries of their keys, or an empty string."""
    entries = () if log_decay is None else tuple(log_decay.shape[k.ndim - 1 :])
    if entries in ((), (k.shape[-1],)):
        return ""
    return (
        "log_decay must have one entry per head, or one for each of the "
        f"{k.shape[-1]} entries of a key, got entries of shape {entries}"
    )


def _groups_divide(q: Tensor, v: Tensor) -> str:
    """Why the groups do not fit the heads, or an empty string."""
    groups, heads = q.shape[-2], v.shape[-2]
    if groups and heads % groups == 0:
        return ""
    return f"the groups of queries and keys must divide the heads, got {groups} and {heads}"


@own_precision
@door(_groups_divide, decay_fits)
def linear_attention(
    q: Float[Tensor, "batch length group d_key"],
    k: Float[Tensor, "batch length group d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head *entry"] | None = None,
    state: Float[Tensor, "batch head d_key d_value"] | None = None,
    *,
    starts: Bool[Tensor, "batch length"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Response to a sequence or to its next chunk, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries, one for each group of adjacent heads.
        k: Keys, one for each group of adjacent heads.
        v: Values.
        log_decay: Logarithm g of the factor by which the state decays before each token, finite
            and at most zero: one per head, or one for each entry of its keys; ``None`` means no
            decay.
        state: State before the first of these tokens; ``None`` is the zero state.
        starts: True where a document begins, whose state before it is zero: see
            :meth:`stateline.layers.SequenceLayer.forward`.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Raises:
        InputError: If a shape, a dtype or a device does not fit the others.

    Example:
        >>> import torch
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        >>> y, state = linear_attention(one, one, v)
        >>> y.flatten()
        tensor([1., 3., 7.])
    """
    if state is None:
        state = zeros_before(v, len(v), v.shape[2], q.shape[3], v.shape[3])
    more = () if starts is None else (starts,)
    return dispatch(OP, "linear_attention", q, k, v, log_decay, state, *more, backend=backend)


linear_attention_step = step_of(OP, linear_attention)
linear_attention_step_ = step_in_place(OP, linear_attention)
