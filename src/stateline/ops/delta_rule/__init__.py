"""Delta rule with a decay per entry: whole sequences, chunks and single steps."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, step_in_place, step_of
from stateline.ops.containment import contained
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.starts import FORGET, Starts, at_starts
from stateline.ops.stepping import zeros_before

CHUNK = 16
"""Tokens of a chunk; the decays between all its tokens are computed for each entry."""


class DeltaSignals(NamedTuple):
    r"""The signals of a delta rule with a decay per entry.

    Attributes:
        q: Queries.
        k: Keys at which values are written.
        v: Values.
        log_decay: Logarithms g of the decays, finite and at most zero.
        a: Where the state is read before the token.
        b: Where the value that was read is added. The state stays bounded if
            :math:`\mathrm{diag}(e^g) + b a^\top` has a norm of at most 1.
    """

    q: Float[Tensor, "batch length head d_key"]
    k: Float[Tensor, "batch length head d_key"]
    v: Float[Tensor, "batch length head d_value"]
    log_decay: Float[Tensor, "batch length head d_key"]
    a: Float[Tensor, "batch length head d_key"]
    b: Float[Tensor, "batch length head d_key"]

    def reset(self, starts: Tensor | None) -> "DeltaSignals":
        """The signals, changed so that each document's first token clears the state."""
        decay, a = at_starts(self.log_decay, starts, FORGET), at_starts(self.a, starts, 0.0)
        return self._replace(log_decay=decay, a=a)


def example(sizes: Sizes) -> Example:
    """Removal at keys of unit length, weak decay."""
    count, width = sizes.heads
    q, k, v = (sizes.signal(count, width) for _ in "qkv")
    log_decay = -0.1 * sizes.signal(count, width).sigmoid()
    a = F.normalize(k, dim=-1)
    b = -a * sizes.signal(count, width).sigmoid()
    signals = DeltaSignals(q, k, v, log_decay, a, b)
    return Example((signals,), 10.0 * sizes.positions * width)


OP = Op(__name__, ["numba", "fla"], example)


@bound(OP, autocast=False)
@contained()
def delta_rule(
    x: DeltaSignals,
    state: Float[Tensor, "batch head d_key d_value"] | None = None,
    *,
    starts: Starts | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length head d_value"], Float[Tensor, "batch head d_key d_value"]]:
    r"""For each token, decay, correct and read one matrix S per head.

    .. math::
        S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + b_t (a_t^\top S_{t-1}) + k_t v_t^\top,
        \qquad y_t = S_t^\top q_t

    What the state holds at a is written at b. For :math:`a = e^g \odot \kappa` and
    :math:`b = -\beta \kappa`, the old value at the key :math:`\kappa` is removed after the decay,
    as in Kimi Delta Attention; for :math:`a = \kappa` and :math:`b = -\kappa \odot \alpha`, before
    it, as in RWKV-7. Computed in the dtype of the state.

    Args:
        x: Queries q, keys k, values v, logarithms g of the decays, and the vectors a and b.

    Returns:
        Outputs in the dtype of ``v``, and the state after the last token.

    Example:
        The second value replaces half of the first.

        >>> import torch
        >>> one, v = torch.ones(1, 2, 1, 1), torch.tensor([4.0, 3.0]).view(1, 2, 1, 1)
        >>> y, state = delta_rule(DeltaSignals(one, one, v, 0 * one, one, -0.5 * one))
        >>> y.flatten()
        tensor([4., 5.])

    References:
        Kimi Team, "Kimi Linear", 2025, equation 1; Peng et al., "RWKV-7 Goose", 2025, section 3;
        the state is the transpose of the second paper's.
    """
    if state is None:
        state = zeros_before(x.v, len(x.v), *x.q.shape[2:], x.v.shape[3])
    return backend(x, state, starts=starts)


delta_rule_step = step_of(OP, delta_rule)
delta_rule_step_ = step_in_place(OP, delta_rule)
