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

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from stateline.ops.dispatch import dispatch, own_precision
from stateline.ops.door import door
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.stepping import step_in_place, step_of, zeros_before

CHUNK = 32
"""Tokens of a chunk, fewer than for linear attention: solving the system costs more."""


def example(sizes: Sizes) -> Example:
    """Keys of unit length, weak decay."""
    count, width = sizes.heads
    q, k, v = (sizes.signal(count, width) for _ in "qkv")
    log_decay, beta = -0.1 * sizes.signal(count).sigmoid(), sizes.signal(count).sigmoid()
    flops = 8.0 * sizes.positions * width
    return Example((q, F.normalize(k, dim=-1), v, log_decay, beta), flops)


OP = Op(
    "gated_delta_rule",
    {
        "numba": f"{__name__}.numba_backend",
        "fla": f"{__name__}.fla_backend",
        "torch": f"{__name__}.pytorch",
        "reference": f"{__name__}.reference",
    },
    example,
)


@own_precision
@door()
def gated_delta_rule(
    q: Float[Tensor, "batch length head d_key"],
    k: Float[Tensor, "batch length head d_key"],
    v: Float[Tensor, "batch length head d_value"],
    log_decay: Float[Tensor, "batch length head"],
    beta: Float[Tensor, "batch length head"],
    state: Float[Tensor, "batch head d_key d_value"] | None = None,
    *,
    starts: Bool[Tensor, "batch length"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""Response to a sequence or to its next chunk, and the state after it.

    Computed in the dtype of the state.

    Args:
        q: Queries.
        k: Keys, of unit length or shorter.
        v: Values.
        log_decay: Logarithm of the decay :math:`\alpha`, finite and at most zero.
        beta: Fraction of the old value that is replaced, from 0 to 1; up to 2, it is reflected.
        state: State before the first of these tokens; ``None`` is the zero state.
        starts: True where a document begins, whose state before it is zero: see
            :meth:`stateline.layers.SequenceLayer.forward`.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Raises:
        InputError: If a shape, a dtype or a device does not fit the others.

    Example:
        The second value replaces the first.

        >>> import torch
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([5.0, 3.0]).view(1, 2, 1, 1)
        >>> y, state = gated_delta_rule(one, one, v, torch.zeros(1, 2, 1), torch.ones(1, 2, 1))
        >>> y.flatten()
        tensor([5., 3.])
    """
    if state is None:
        state = zeros_before(v, len(v), *q.shape[2:], v.shape[3])
    more = () if starts is None else (starts,)
    return dispatch(OP, "gated_delta_rule", q, k, v, log_decay, beta, state, *more, backend=backend)


gated_delta_rule_step = step_of(OP, gated_delta_rule)
gated_delta_rule_step_ = step_in_place(OP, gated_delta_rule)
