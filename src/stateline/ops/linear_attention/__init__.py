r"""Linear attention: one matrix per head; keys write values into it, queries read them.

.. math:: S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad y_t = S_t^\top q_t

Without the decay g, this is causal attention without the softmax. With it, this is the state space
model of Mamba-2, where q, k and v are called C, B and x (times the step).

References:
    Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3; Dao and Gu,
    "Transformers are SSMs", ICML 2024, section 6.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.linear_attention import pytorch, reference
from stateline.ops.linear_attention.pytorch import CHUNK
from stateline.ops.op import Op

OP = Op(
    "linear_attention",
    {
        "numba": "stateline.ops.linear_attention.numba_backend",
        "fla": "stateline.ops.linear_attention.fla_backend",
        "torch": pytorch,
        "reference": reference,
    },
)

__all__ = ["CHUNK", "OP", "linear_attention", "linear_attention_step"]


@own_precision
def linear_attention(
    q: Float[Tensor, "batch length group d_key"],
    k: Float[Tensor, "batch length group d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head"] | None,
    state: Float[Tensor, "batch head d_key d_value"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Response to the next chunk of a sequence, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries, one for each group of adjacent heads.
        k: Keys, one for each group of adjacent heads.
        v: Values.
        log_decay: Logarithm g of the factor by which the state decays before each token, finite
            and at most zero; ``None`` means no decay.
        state: State before the first of these tokens.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Raises:
        InputError: If the number of groups does not divide the number of heads, or ``log_decay``
            and ``state`` are in the wrong order.

    Example:
        >>> import torch
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        >>> y, state = linear_attention(one, one, v, None, torch.zeros(1, 1, 1, 1))
        >>> y.flatten()
        tensor([1., 3., 7.])
    """
    _check(q, v, log_decay, state)
    return dispatch(OP, "linear_attention", q, k, v, log_decay, state, backend=backend)


def linear_attention_step(
    q: Float[Tensor, "batch group d_key"],
    k: Float[Tensor, "batch group d_key"],
    v: Float[Tensor, "batch head d_value"],
    log_decay: Float[Tensor, "batch head"] | None,
    state: Float[Tensor, "batch head d_key d_value"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Response to the next token, and the state after it: one step of the recurrence.

    Args:
        q: Query, one for each group of adjacent heads.
        k: Key, one for each group of adjacent heads.
        v: Value.
        log_decay: Logarithm of the state's decay, finite and at most zero; ``None`` means no decay.
        state: State before this token.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output in the dtype of ``v``, and the state after the token.

    Raises:
        InputError: If the number of groups does not divide the number of heads, or ``log_decay``
            and ``state`` are in the wrong order.
    """
    _check(q, v, log_decay, state)
    return dispatch(OP, "linear_attention_step", q, k, v, log_decay, state, backend=backend)


def _check(q: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None) -> None:
    groups, heads = q.shape[-2], v.shape[-2]
    if heads % groups:
        raise InputError(
            "the number of groups of queries and keys must divide the number of heads, "
            f"got {groups} and {heads}"
        )
    if state is None or state.ndim != 4 or (log_decay is not None and log_decay.ndim == 4):
        raise InputError(
            "linear attention takes (q, k, v, log_decay, state), with the state (batch, head, "
            "d_key, d_value) last; log_decay may be None"
        )
