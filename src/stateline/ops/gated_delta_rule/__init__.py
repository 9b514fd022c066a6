r"""Gated delta rule: one matrix per head; writing a value at a key replaces the old value there.

.. math::
    S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,
    \qquad y_t = S_t^\top q_t

For keys of unit length and :math:`\beta = 1`, the new value replaces the old one at the key.
:math:`\alpha` makes the whole state decay.

References:
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025, equation 10; the state is the
    transpose of the paper's.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.gated_delta_rule import pytorch, reference
from stateline.ops.gated_delta_rule.pytorch import CHUNK
from stateline.ops.op import Op

OP = Op(
    "gated_delta_rule",
    {
        "numba": "stateline.ops.gated_delta_rule.numba_backend",
        "fla": "stateline.ops.gated_delta_rule.fla_backend",
        "torch": pytorch,
        "reference": reference,
    },
)

__all__ = ["CHUNK", "OP", "gated_delta_rule", "gated_delta_rule_step"]


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
    r"""Response to the next chunk of a sequence, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries.
        k: Keys, of unit length or shorter.
        v: Values.
        log_decay: Logarithm of the decay :math:`\alpha`, finite and at most zero.
        beta: Fraction of the old value that is replaced, from 0 to 1.
        state: State before the first of these tokens.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Example:
        The second value replaces the first.

        >>> import torch
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([5.0, 3.0]).view(1, 2, 1, 1)
        >>> log_decay, beta = torch.zeros(1, 2, 1), torch.ones(1, 2, 1)
        >>> y, state = gated_delta_rule(one, one, v, log_decay, beta, torch.zeros(1, 1, 1, 1))
        >>> y.flatten()
        tensor([5., 3.])
    """
    return dispatch(OP, "gated_delta_rule", q, k, v, log_decay, beta, state, backend=backend)


def gated_delta_rule_step(
    q: Float[Tensor, "batch head d_key"],
    k: Float[Tensor, "batch head d_key"],
    v: Float[Tensor, "batch head d_value"],
    log_decay: Float[Tensor, "batch head"],
    beta: Float[Tensor, "batch head"],
    state: Float[Tensor, "batch head d_key d_value"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""Response to the next token, and the state after it: one step of the recurrence.

    Args:
        q: Query.
        k: Key, of unit length or shorter.
        v: Value.
        log_decay: Logarithm of the decay :math:`\alpha`, finite and at most zero.
        beta: Fraction of the old value that is replaced, from 0 to 1.
        state: State before this token.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output in the dtype of ``v``, and the state after the token.
    """
    return dispatch(OP, "gated_delta_rule_step", q, k, v, log_decay, beta, state, backend=backend)
