"""The definition of a diagonal state space model with many inputs: its recurrence."""

import torch
from torch import Tensor

from stateline.ops.diagonal_ssm.reference import as_complex
from stateline.ops.mimo_ssm import MIMOWeights
from stateline.ops.stepping import one_token


def mimo_ssm(u: Tensor, weights: MIMOWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence, one input after the other."""
    log_a, b, c = weights
    a, b_c, c_c, x = (as_complex(planes) for planes in (log_a, b, c, state))
    outputs = []
    for u_t in u.unbind(dim=-2):
        x = a.exp() * x + (b_c @ u_t[..., None].to(b_c.dtype))[..., 0]
        outputs.append(2 * (c_c @ x[..., None])[..., 0].real)
    y = torch.stack(outputs, dim=-2) if outputs else u.new_zeros(*u.shape[:-1], len(c))
    return y.to(u.dtype), torch.view_as_real(x)


mimo_ssm_step = one_token(mimo_ssm)
