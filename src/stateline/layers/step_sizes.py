"""How the steps of selective layers begin."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

DT_MIN, DT_MAX = 1e-3, 1e-1


def initial_step_bias(count: int) -> Float[Tensor, " count"]:
    """Biases b with softplus(b) log-uniform from 0.001 to 0.1.

    References:
        Gu and Dao, "Mamba", 2023, section 3.6; the range of the official code.
    """
    dt = torch.empty(count).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp()
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
