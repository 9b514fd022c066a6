"""Gated delta rule: whole sequences, chunks and single steps."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_in_place, step_of
from stateline.ops.containment import contained
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.starts import FORGET, Starts, at_starts
from stateline.ops.stepping import zeros_before

CHUNK = 32
"""Tokens of a chunk, fewer than for linear attention: solving the system costs more."""


class GatedDeltaSignals(NamedTuple):
    r"""The signals of a gated delta rule.

    Attributes:
        q: Queries.
        k: Keys, of unit length or shorter.
        v: Values.
        log_decay: Logarithm of the decay :math:`\alpha`, finite and at most zero.
        beta: Fraction of the old value that is replaced, from 0 to 1, or to 2 for reflections.
    """

    q: Float[Tensor, "batch length head d_key"]
    k: Float[Tensor, "batch length head d_key"]
    v: Float[Tensor, "batch length head d_value"]
    log_decay: Float[Tensor, "batch length head"]
    beta: Float[Tensor, "batch length head"]

    def reset(self, starts: Tensor | None) -> "GatedDeltaSignals":
        """The signals, with a decay that clears the state at each document's first token."""
        return self._replace(log_decay=at_starts(self.log_decay, starts, FORGET))


def example(sizes: Sizes) -> Example:
    """Keys of unit length, weak decay."""
    count, width = sizes.heads
    q, k, v = (sizes.signal(count, width) for _ in "qkv")
    log_decay, beta = -0.1 * sizes.signal(count).sigmoid(), sizes.signal(count).sigmoid()
    signals = GatedDeltaSignals(q, F.normalize(k, dim=-1), v, log_decay, beta)
    return Example((signals,), 8.0 * sizes.positions * width)


OP = Op(__name__, ["numba", "fla"], example)


@bound(OP, autocast=False)
@contained()
def gated_delta_rule(
    x: GatedDeltaSignals,
    state: Float[Tensor, "batch head d_key d_value"] | None = None,
    *,
    starts: Starts | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""For each token, decay one matrix S per head, and replace the value at the key.

    .. math::
        S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,
        \qquad y_t = S_t^\top q_t

    For keys of unit length and :math:`\beta = 1`, the new value replaces the old one at the key.
    :math:`\alpha` makes the whole state decay. Computed in the dtype of the state.

    Args:
        x: Queries q, keys k, values v, logarithms of the decays :math:`\alpha`, and :math:`\beta`.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Example:
        The second value replaces the first.

        >>> import torch
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([5.0, 3.0]).view(1, 2, 1, 1)
        >>> x = GatedDeltaSignals(one, one, v, torch.zeros(1, 2, 1), torch.ones(1, 2, 1))
        >>> gated_delta_rule(x)[0].flatten()
        tensor([5., 3.])

    References:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks", ICLR 2025, equation 10; the state is
        the transpose of the paper's.
    """
    if state is None:
        state = zeros_before(x.v, len(x.v), *x.q.shape[2:], x.v.shape[3])
    return backend(x, state, starts=starts)


gated_delta_rule_step = step_of(OP, gated_delta_rule)
gated_delta_rule_step_ = step_in_place(OP, gated_delta_rule)
