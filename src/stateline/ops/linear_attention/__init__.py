r"""Linear attention: a matrix per head that keys write values into and queries read.

.. math:: S_t = e^{g_t} S_{t-1} + k_t v_t^\top, \qquad y_t = S_t^\top q_t

Without the decay g it is causal attention without the softmax. With it, it is the state space model
of Mamba-2, where q, k, v are called C, B and (step times) x.

References:
    Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3; Dao and Gu,
    "Transformers are SSMs", ICML 2024, section 6.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.errors import InputError
from stateline.ops.backend import choose, own_precision
from stateline.ops.linear_attention import pytorch, reference
from stateline.ops.linear_attention.pytorch import CHUNK
from stateline.ops.linear_attention.reference import linear_attention_step

BACKENDS = {"torch": pytorch, "reference": reference}

__all__ = ["BACKENDS", "CHUNK", "linear_attention", "linear_attention_step"]


@own_precision
def linear_attention(
    q: Float[Tensor, "batch length group d_key"],
    k: Float[Tensor, "batch length group d_key"],
    v: Float[Tensor, "batch length head d_value"],
    state: Float[Tensor, "batch head d_key d_value"],
    log_decay: Float[Tensor, "batch length head"] | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    """Response to the next piece of a sequence, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries, one for each group of neighbouring heads.
        k: Keys, likewise.
        v: Values.
        state: State before the first of these tokens.
        log_decay: Logarithm g of the factor by which a state decays before each token, finite
            and at most zero; ``None``: it does not.
        backend: Implementation, by default the fastest.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Raises:
        InputError: If the number of groups does not divide the number of heads.

    Example:
        >>> import torch
        >>> one, v = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
        >>> y, state = linear_attention(one, one, v, torch.zeros(1, 1, 1, 1))
        >>> y.flatten()
        tensor([1., 3., 7.])
    """
    if v.shape[2] % q.shape[2]:
        raise InputError(
            "the number of groups of queries and keys must divide the number of heads, "
            f"got {q.shape[2]} and {v.shape[2]}"
        )
    return choose("linear_attention", BACKENDS, backend).linear_attention(q, k, v, state, log_decay)
