r"""Diagonal state space model: whole sequences, chunks and single steps.

.. math:: x_t = a\, x_{t-1} + b\, u_t, \qquad y_t = 2\,\mathrm{Re} \sum_n c_n x_{t,n}

Each channel has its own complex vectors a, b, c and its own state x. Modes come in conjugate pairs;
one of each pair is stored, hence the factor 2. Complex numbers are real planes (a last axis of
length 2).

Shapes: ``u`` is ``(*batch, length, channel)``; ``log_a``, ``b`` and ``c`` are
``(channel, mode, 2)``. A ``log_a`` of one channel serves all channels, and its powers are computed
once. A state is ``(*batch, channel, mode, 2)``, at least float32. ``c`` may hold several readouts
of every channel, ``(readout * channel, mode, 2)``: output ``i * channel + j`` reads channel j.

References:
    Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models",
    NeurIPS 2022, section 3; Fu et al., "Hungry Hungry Hippos", ICLR 2023, algorithm 2 (state
    passing).
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import dispatch, own_precision
from stateline.ops.diagonal_ssm import pytorch, reference
from stateline.ops.op import Op
from stateline.ops.stepping import Stepper

OP = Op(
    "diagonal_ssm",
    {
        "numba": "stateline.ops.diagonal_ssm.numba_backend",
        "triton": "stateline.ops.diagonal_ssm.triton_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


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

    It equals the convolution with :math:`k_t = 2\,\mathrm{Re} \sum_n c_n b_n a_n^t`, which is how
    the ``torch`` backend computes it; see :func:`stateline.ops.fft_conv` for its rounding.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        backend: Backend that must run the call; ``"auto"`` chooses one.

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
    return dispatch(OP, "diagonal_ssm", u, log_a, b, c, backend=backend)


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
    """Response to the next chunk of a sequence, and the state after it.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        state: State before the first of these inputs.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output signal in the dtype of ``u``, and the state after the last input.
    """
    return dispatch(OP, "diagonal_ssm_chunk", u, log_a, b, c, state, backend=backend)


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
    """Response from the zero state, at every ``stride``-th position only.

    It costs less than the whole response if ``c`` has many readouts.

    Args:
        u: Input signal.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        stride: Inputs per output, at least 1.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Outputs at positions ``stride - 1``, ``2 * stride - 1``, ..., in the dtype of ``u``.
    """
    return dispatch(OP, "diagonal_ssm_every", u, log_a, b, c, stride, backend=backend)


def diagonal_ssm_step(
    u: Float[Tensor, "*batch channel"],
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    state: Float[Tensor, "*batch channel mode 2"],
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "*batch output"], Float[Tensor, "*batch channel mode 2"]]:
    """Response to the next input, and the state after it: one step of the recurrence.

    Args:
        u: Input.
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        state: State before this input.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        Output in the dtype of ``u``, and the state after the input.
    """
    return dispatch(OP, "diagonal_ssm_step", u, log_a, b, c, state, backend=backend)


def diagonal_ssm_stepper(
    log_a: Float[Tensor, "#channel mode 2"],
    b: Float[Tensor, "channel mode 2"],
    c: Float[Tensor, "output mode 2"],
    skip: Float[Tensor, " output"],
    *,
    backend: str = "auto",
) -> Stepper:
    """Prepare many steps without gradients, each with a skip connection.

    What follows from the weights alone is computed here once, and the state changes in place.

    Args:
        log_a: Logarithm of the transition.
        b: Input vector.
        c: Output vector.
        skip: Weight of the input of each output's channel.
        backend: Backend that must run the steps; ``"auto"`` chooses one.

    Returns:
        ``stepper(u, state)`` returns the output for one input, that of :func:`diagonal_ssm_step`
        plus the skip connection, and changes ``state``. It does not follow later changes of the
        weights.
    """
    return dispatch(OP, "diagonal_ssm_stepper", log_a, b, c, skip, backend=backend)
