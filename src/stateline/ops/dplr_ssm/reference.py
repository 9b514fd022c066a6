"""The definition of a diagonal-plus-low-rank state space model: its bilinear recurrence, dense."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.diagonal_ssm.reference import as_complex
from stateline.ops.dplr_ssm import DPLRWeights
from stateline.ops.stepping import one_token


def dplr_ssm(u: Tensor, weights: DPLRWeights, state: Tensor | None) -> tuple[Tensor, Any]:
    """Run the recurrence on both modes of each pair, one input after the other."""
    dtype = torch.promote_types(u.dtype, weights.b.dtype)
    dt, a, p, b, c = (x.to(dtype) for x in weights)
    start = b.new_zeros(*u.shape[:-2], *b.shape) if state is None else state.to(dtype)
    diagonal, low_rank, b_c, x = (_whole(planes) for planes in (a, p, b, start))
    half_step = dt[:, None, None] / 2
    transition = torch.diag_embed(diagonal) - low_rank[..., None] * low_rank[..., None, :].conj()
    one = torch.eye(diagonal.shape[-1], dtype=transition.dtype, device=transition.device)
    inverse = torch.linalg.inv(one - half_step * transition)
    a_bar = inverse @ (one + half_step * transition)
    b_bar = (inverse @ (dt[:, None] * b_c)[..., None])[..., 0]
    c_c = _whole(c).unflatten(0, (-1, u.shape[-1]))  # (readout, channel, both halves)
    outputs = []
    for u_t in u.unbind(dim=-2):
        x = (a_bar @ x[..., None])[..., 0] + b_bar * u_t[..., None]
        outputs.append((c_c * x[..., None, :, :]).sum(dim=-1).real.flatten(-2))
    y = torch.stack(outputs, dim=-2) if outputs else u.new_zeros(*u.shape[:-1], len(c))
    after = None if state is None else torch.view_as_real(x[..., : a.shape[1]]).to(state.dtype)
    return y.to(u.dtype), after


def dplr_ssm_every(u: Tensor, weights: DPLRWeights, stride: int) -> Tensor:
    """Run the recurrence over all inputs, and keep every ``stride``-th output."""
    return dplr_ssm(u, weights, None)[0][..., stride - 1 :: stride, :]


dplr_ssm_step = one_token(dplr_ssm)


def _whole(planes: Float[Tensor, "*shape mode 2"]) -> Tensor:
    """All modes as complex numbers: the stored ones, then their conjugates."""
    half = as_complex(planes)
    return torch.cat([half, half.conj()], dim=-1)
