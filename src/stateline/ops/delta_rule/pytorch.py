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

from stateline.ops.delta_rule import CHUNK
from stateline.ops.delta_rule.reference import delta_rule_step as delta_rule_step
from stateline.ops.linear_attention.pytorch import decays, products
from stateline.ops.stepping import over_chunks


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve the system of a chunk."""
    between, since, until = decays(log_decay.mT)  # (batch, head, entry, ...)
    since, until = since.squeeze(-1).mT, until.squeeze(-1).mT
    before = F.pad(since[..., :-1, :], (0, 0, 1, 0), value=1.0)
    earlier = F.pad(between[..., :-1, :], (0, 0, 1, 0))  # from token s to the one before t
    wanted = (before * a) @ state + products(a, earlier, k) @ v
    system = -products(a, earlier, b)  # the solver reads only the part below the diagonal
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    inside = products(q, between, b) @ u + products(q, between, k) @ v
    written = (until * b).mT @ u + (until * k).mT @ v
    return (since * q) @ state + inside, since[..., -1, :, None] * state + written


delta_rule = over_chunks(_chunk, CHUNK)
