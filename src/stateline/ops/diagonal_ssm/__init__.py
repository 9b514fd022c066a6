r"""Diagonal state space model, in its three verbs.

.. math:: x_t = a\, x_{t-1} + b\, u_t, \qquad y_t = 2\,\mathrm{Re} \sum_n c_n x_{t,n}

Each channel has its own complex vectors a, b, c and state x, of which the modes stand for conjugate
pairs: hence the factor 2. Complex numbers are real planes (a last axis of length 2).

Shapes: ``u`` is ``(*batch, length, channel)``; ``log_a``, ``b`` and ``c`` are
``(channel, mode, 2)``, where a ``log_a`` of one channel serves all: its powers are computed once.
A state is ``(*batch, channel, mode, 2)``, at least float32. ``c`` may hold several readouts of
every channel, ``(readout * channel, mode, 2)``: output ``i * channel + j`` reads channel j.

References:
    Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
    NeurIPS 2022, section 3; Fu et al., "Hungry Hungry Hippos", ICLR 2023, algorithm 2 (state
    passing).
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import choose, own_precision
from stateline.ops.diagonal_ssm import pytorch, reference
from stateline.ops.planes import exponential, multiply

BACKENDS = {"torch": pytorch, "reference": reference}


@own_precision
def diagonal_ssm(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch length output"]:
    r"""Response to a whole sequence, from the zero state.

    A convolution with :math:`k_t = 2\,\mathrm{Re} \sum_n c_n b_n a_n^t`: no state is ever built.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        backend: Implementation, by default the fastest.

    Returns:
        Output signal, in the dtype of ``u``.

    Example:
        One real mode that halves at each step.

        >>> import torch
        >>> log_a = torch.tensor([[[0.5, 1.0]]]).log()
        >>> half = torch.tensor([[[0.5, 0.0]]])
        >>> u = torch.tensor([[[1.0], [0.0], [0.0]]])
        >>> y = diagonal_ssm(u, log_a, torch.tensor([[[1.0, 0.0]]]), half)
        >>> y.flatten().mul(100).round()
        tensor([100.,  50.,  25.])
    """
    return choose("diagonal_ssm", BACKENDS, backend).diagonal_ssm(u, log_a, b, c)


@own_precision
def diagonal_ssm_chunk(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch length output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next piece of a sequence, and the state after it.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        state: State before the first of these inputs.
        backend: Implementation, by default the fastest.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.
    """
    return choose("diagonal_ssm", BACKENDS, backend).diagonal_ssm_chunk(u, log_a, b, c, state)


@own_precision
def diagonal_ssm_every(
    u: Float[Tensor, "*batch length channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    stride: int,
    *,
    backend: str = "auto",
) -> Float[Tensor, "*batch taken output"]:
    """The response from the zero state at every ``stride``-th input only: at the last of each.

    That costs less than the whole response: what many readouts see is computed rarely.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        stride: Inputs per output, at least 1.
        backend: Implementation, by default the fastest.

    Returns:
        Outputs ``stride - 1``, ``2 * stride - 1``, ... of the signal, in the dtype of ``u``.
    """
    every = choose("diagonal_ssm", BACKENDS, backend).diagonal_ssm_every
    return every(u, log_a, b, c, stride)


def diagonal_ssm_step(
    u: Float[Tensor, "*batch channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next input, and the state after it: the defining recurrence, once."""
    state = multiply(exponential(log_a), state) + b * u.to(state.dtype)[..., None, None]
    readouts = c.unflatten(0, (-1, u.shape[-1]))
    y = 2 * multiply(readouts, state[..., None, :, :, :])[..., 0].sum(dim=-1)
    return y.flatten(-2).to(u.dtype), state
