r"""Delta rule in chunks: a triangular system inside a chunk, the state between chunks.

With :math:`u_t = a_t^\top S_{t-1}`, each token adds :math:`b_t u_t^\top + k_t v_t^\top`. In a chunk
that starts with state S, with :math:`G_t` the sum of the logarithmic decays since its start,

.. math::
    u_t = S^\top (e^{G_{t-1}} \odot a_t) + \sum_{s < t} \sum_i e^{G_{t-1,i} - G_{s,i}} a_{t,i}
    (b_{s,i} u_s + k_{s,i} v_s),

a system with a unit lower triangular matrix. Given u, the rest is linear attention with two keys
and two values for each token. Every exponent is a sum of logarithmic decays, so none is positive.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stateline.ops.delta_rule import CHUNK, DeltaSignals
from stateline.ops.delta_rule.reference import delta_rule_step as delta_rule_step
from stateline.ops.linear_attention.pytorch import decays


def delta_rule(
    x: DeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Solve the system of each chunk, and carry the state to the next."""
    if x.v.shape[1] == 0:
        return x.v.clone(), state.clone()
    chunks = (
        signal.to(state.dtype).transpose(1, 2).split(CHUNK, dim=2) for signal in x.reset(starts)
    )  # each (batch, head, length, ...)
    outputs = []
    for q_c, k_c, v_c, g_c, a_c, b_c in zip(*chunks, strict=True):
        between, since, until = decays(g_c.mT)  # (batch, head, entry, ...)
        since, until = since.squeeze(-1).mT, until.squeeze(-1).mT
        before = F.pad(since[..., :-1, :], (0, 0, 1, 0), value=1.0)
        earlier = F.pad(between[..., :-1, :], (0, 0, 1, 0))  # from token s to the one before t
        wanted = (before * a_c) @ state + _products(a_c, earlier, k_c) @ v_c
        system = -_products(a_c, earlier, b_c)  # the solver reads only the part below the diagonal
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        inside = _products(q_c, between, b_c) @ u + _products(q_c, between, k_c) @ v_c
        outputs.append((since * q_c) @ state + inside)
        written = (until * b_c).mT @ u + (until * k_c).mT @ v_c
        state = since[..., -1, :, None] * state + written
    return torch.cat(outputs, dim=2).transpose(1, 2).to(x.v.dtype), state


def _products(x: Tensor, decay: Tensor, w: Tensor) -> Tensor:
    """Products of x at token t with w at token s that has decayed in between (..., t, s)."""
    return torch.einsum("bhti,bhits,bhsi->bhts", x, decay, w)
