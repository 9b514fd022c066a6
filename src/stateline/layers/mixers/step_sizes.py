"""Initial step sizes of state space models."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def uniform_log_dt(dt_min: float, dt_max: float, *shape: int) -> Float[Tensor, "*shape"]:
    """Logarithms of steps, drawn uniformly between the logarithms of the limits."""
    return torch.empty(shape).uniform_(math.log(dt_min), math.log(dt_max))


def initial_step_bias(count: int) -> Float[Tensor, " count"]:
    """Biases b of selective layers: softplus(b) is log-uniform from 0.001 to 0.1.

    References:
        Gu and Dao, "Mamba", 2023, section 3.6; the range of the official code.
    """
    dt = uniform_log_dt(1e-3, 1e-1, count).exp()
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
