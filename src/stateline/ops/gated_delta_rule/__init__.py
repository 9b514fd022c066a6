r"""Gated delta rule: a matrix per head in which a key's new value replaces the old one.

.. math::
    S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,
    \qquad y_t = S_t^\top q_t

For keys of length one and :math:`\beta = 1`, what stood at the key is gone and the new value stands
there; :math:`\alpha` lets all of the state decay.

References:
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025, equation 10; the state is the
    transpose of the paper's.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import choose, own_precision
from stateline.ops.gated_delta_rule import pytorch, reference
from stateline.ops.gated_delta_rule.pytorch import CHUNK
from stateline.ops.gated_delta_rule.reference import gated_delta_rule_step

BACKENDS = {"torch": pytorch, "reference": reference}

__all__ = ["BACKENDS", "CHUNK", "gated_delta_rule", "gated_delta_rule_step"]


@own_precision
def gated_delta_rule(
    q: Float[Tensor, "batch length head d_key"],
    k: Float[Tensor, "batch length head d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head"],
    beta: Float[Tensor, "batch length head"],
    state: Float[Tensor, "batch head d_key d_value"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""Response to the next piece of a sequence, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries.
        k: Keys, of length one (or less).
        v: Values.
        log_decay: Logarithm of the decay :math:`\alpha`, finite and at most zero.
        beta: How much of the old value is replaced, from 0 to 1.
        state: State before the first of these tokens.
        backend: Implementation, by default the fastest.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Example:
        The second value replaces the first.

        >>> import torch
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([5.0, 3.0]).view(1, 2, 1, 1)
        >>> nothing, all_of_it = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> y, state = gated_delta_rule(one, one, v, nothing, all_of_it, torch.zeros(1, 1, 1, 1))
        >>> y.flatten()
        tensor([5., 3.])
    """
    rule = choose("gated_delta_rule", BACKENDS, backend).gated_delta_rule
    return rule(q, k, v, log_decay, beta, state)
