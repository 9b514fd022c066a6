r"""Gated delta rule in chunks: a triangular system inside a chunk, the state between chunks.

Each token adds :math:`k_t u_t^\top`, where u is the part of the value that the state does not yet
hold at the key. In a chunk that starts with state S, with :math:`G_t` the sum of the logarithmic
decays since its start,

.. math::
    u_t = \beta_t \Bigl(v_t - e^{G_t} S^\top k_t
    - \sum_{s < t} e^{G_t - G_s} (k_t \cdot k_s)\, u_s \Bigr),

a system with a unit lower triangular matrix. Given u, the rest is linear attention with values u.
"""

import torch
from torch import Tensor

from stateline.ops.gated_delta_rule import CHUNK
from stateline.ops.gated_delta_rule.reference import gated_delta_rule_step as gated_delta_rule_step
from stateline.ops.linear_attention.pytorch import decays
from stateline.ops.stepping import over_chunks


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve the system of a chunk."""
    between, since, until = decays(log_decay)
    scaled = beta[..., None] * k
    system = scaled @ k.mT * between  # the solver reads only the part below the diagonal
    wanted = beta[..., None] * v - since * (scaled @ state)
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    y = since * (q @ state) + (q @ k.mT * between) @ u
    return y, since[..., -1:, :] * state + (until * k).mT @ u


gated_delta_rule = over_chunks(_chunk, CHUNK)
