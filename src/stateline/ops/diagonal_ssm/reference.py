"""The definition of a diagonal state space model: its recurrence, in complex numbers."""

import torch
from jaxtyping import Float
from torch import Tensor

from stateline.ops.convolution import skipped
from stateline.ops.stepping import Stepper, copying


def diagonal_ssm(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
) -> Float[Tensor, "*batch length output"]:
    """Run the recurrence from the zero state."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    zeros = torch.zeros(*u.shape[:-2], *b.shape, dtype=dtype, device=u.device)
    return diagonal_ssm_chunk(u, log_a, b, c, zeros)[0]


def diagonal_ssm_chunk(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch channel mode 2"]]:
    """Run the recurrence, one input after the other."""
    a, b_c = _complex(log_a).exp(), _complex(b)
    c_c = _complex(c).unflatten(0, (-1, u.shape[-1]))  # (readout, channel, mode)
    x, outputs = _complex(state), []
    for u_t in u.unbind(dim=-2):
        x = a * x + b_c * u_t[..., None]
        outputs.append(2 * (c_c * x[..., None, :, :]).sum(dim=-1).real.flatten(-2))
    y = torch.stack(outputs, dim=-2) if outputs else u.new_zeros(*u.shape[:-1], len(c))
    return y.to(u.dtype), torch.view_as_real(x)


def diagonal_ssm_every(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    stride: int,
) -> Float[Tensor, "*batch taken output"]:
    """Run the recurrence over all inputs, and keep every ``stride``-th output."""
    return diagonal_ssm(u, log_a, b, c)[..., stride - 1 :: stride, :]


def diagonal_ssm_step(
    u: Float[Tensor, "*batch channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch channel mode 2"]]:
    """Run the recurrence over one input."""
    y, state = diagonal_ssm_chunk(u[..., None, :], log_a, b, c, state)
    return y[..., 0, :], state


def diagonal_ssm_stepper(log_a: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Stepper:
    """Steps whose new state is copied over the old one."""

    def step(u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, after = diagonal_ssm_step(u, log_a, b, c, state)
        return y + skipped(u, skip), after

    return copying(step, (), n_states=1)


def _complex(planes: Float[Tensor, "*shape 2"]) -> Tensor:
    """Planes as a complex tensor; a copy, because a float64 view needs 16-byte alignment."""
    return torch.complex(planes[..., 0], planes[..., 1])
