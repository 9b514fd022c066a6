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

from stateline.ops.gated_delta_rule import CHUNK, GatedDeltaSignals
from stateline.ops.gated_delta_rule.reference import gated_delta_rule_step as gated_delta_rule_step
from stateline.ops.linear_attention.pytorch import decays


def gated_delta_rule(
    x: GatedDeltaSignals, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Solve the system of each chunk, and carry the state to the next."""
    if x.v.shape[1] == 0:
        return x.v.clone(), state.clone()
    chunks = (
        signal.to(state.dtype).transpose(1, 2).split(CHUNK, dim=2) for signal in x.reset(starts)
    )  # each (batch, head, length, ...)
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*chunks, strict=True):
        between, since, until = decays(g_c)
        scaled = beta_c[..., None] * k_c
        system = scaled @ k_c.mT * between  # the solver reads only the part below the diagonal
        wanted = beta_c[..., None] * v_c - since * (scaled @ state)
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(since * (q_c @ state) + (q_c @ k_c.mT * between) @ u)
        state = since[..., -1:, :] * state + (until * k_c).mT @ u
    return torch.cat(outputs, dim=2).transpose(1, 2).to(x.v.dtype), state
