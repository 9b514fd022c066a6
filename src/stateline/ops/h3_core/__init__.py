r"""The core of H3 between its projections: shift filter, gate, diagonal SSM, gate.

.. math:: y = q \odot \mathrm{SSM}_{\mathrm{diag}}(\mathrm{filter}(k) \odot v)

Channel ``head * d_head + entry`` of q, k and v belongs to a head. Wider heads (``d_head > 1``) use
the outer product of filtered key and value, one diagonal SSM input for each pair of entries, and
the query contracts the key axis.

Shapes: ``q``, ``k`` and ``v`` are ``(batch, length, d_model)``, usually views of one projection.
``taps`` ``(d_model, taps)`` is the causal filter of the keys, including its skip connection.
``log_a``, ``b`` and ``c`` are those of :func:`stateline.ops.diagonal_ssm` with heads as channels:
``d_head = d_model / len(b)``; ``skip`` ``(output,)`` is the skip connection of each of its outputs.
States are ``past`` ``(batch, taps - 1, d_model)``, the latest keys, oldest first, and ``state``
``(batch, d_head, d_head, head, mode, 2)``, key entry first.

References:
    Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2 and algorithm 1.
"""

from jaxtyping import Float
from torch import Tensor

from stateline.ops.backend import dispatch
from stateline.ops.h3_core import pytorch, reference
from stateline.ops.op import Op
from stateline.ops.stepping import Stepper

OP = Op(
    "h3_core",
    {
        "numba": "stateline.ops.h3_core.numba_backend",
        "triton": "stateline.ops.h3_core.triton_backend",
        "torch": pytorch,
        "reference": reference,
    },
)


def h3_core(  # noqa: PLR0913
    q: Float[Tensor, "batch length d_model"],
    k: Float[Tensor, "batch length d_model"],
    v: Float[Tensor, "batch length d_model"],
    taps: Float[Tensor, "d_model taps"],
    log_a: Float[Tensor, "#head mode 2"],
    b: Float[Tensor, "head mode 2"],
    c: Float[Tensor, "output mode 2"],
    skip: Float[Tensor, " output"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "batch length read"]:
    """Response to a whole sequence, from zero states.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        taps: Filter of the keys.
        log_a: Logarithm of the transition of the diagonal SSM.
        b: Input vector of the diagonal SSM.
        c: Output vector of the diagonal SSM, one or more readouts of every head.
        skip: Skip connection of each output of the diagonal SSM.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        ``d_model`` channels for each readout, in the dtype of ``q``.

    Example:
        The filter delays keys by one, the state never decays: each key opens for the next value.

        >>> import torch
        >>> k = torch.tensor([[[1.0], [0.0], [0.0]]])
        >>> v = torch.tensor([[[5.0], [7.0], [9.0]]])
        >>> zero, half = torch.zeros(1, 1, 2), torch.tensor([[[0.5, 0.0]]])
        >>> delay = torch.tensor([[0.0, 1.0]])
        >>> y = h3_core(torch.ones(1, 3, 1), k, v, delay, zero, 2 * half, half, torch.zeros(1))
        >>> y.flatten().round().abs()
        tensor([0., 7., 7.])
    """
    return dispatch(OP, "h3_core", q, k, v, taps, log_a, b, c, skip, backend=backend)


def h3_core_chunk(  # noqa: PLR0913
    q: Float[Tensor, "batch length d_model"],
    k: Float[Tensor, "batch length d_model"],
    v: Float[Tensor, "batch length d_model"],
    taps: Float[Tensor, "d_model taps"],
    log_a: Float[Tensor, "#head mode 2"],
    b: Float[Tensor, "head mode 2"],
    c: Float[Tensor, "output mode 2"],
    skip: Float[Tensor, " output"],
    past: Float[Tensor, "batch past d_model"],
    state: Float[Tensor, "batch d_head d_head head mode 2"],
    *,
    backend: str = "auto",
) -> tuple[
    Float[Tensor, "batch length read"],
    Float[Tensor, "batch past d_model"],
    Float[Tensor, "batch d_head d_head head mode 2"],
]:
    """Response to the next chunk of a sequence, and the states after it.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        taps: Filter of the keys.
        log_a: Logarithm of the transition of the diagonal SSM.
        b: Input vector of the diagonal SSM.
        c: Output vector of the diagonal SSM, one or more readouts of every head.
        skip: Skip connection of each output of the diagonal SSM.
        past: Keys before this chunk.
        state: State of the diagonal SSM before this chunk.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        ``d_model`` channels for each readout, in the dtype of ``q``; the latest keys; the state.
    """
    inputs = (q, k, v, taps, log_a, b, c, skip, past, state)
    return dispatch(OP, "h3_core_chunk", *inputs, backend=backend)


def h3_core_step(  # noqa: PLR0913
    q: Float[Tensor, "batch d_model"],
    k: Float[Tensor, "batch d_model"],
    v: Float[Tensor, "batch d_model"],
    weights: Float[Tensor, "taps d_model"],
    log_a: Float[Tensor, "#head mode 2"],
    b: Float[Tensor, "head mode 2"],
    c: Float[Tensor, "output mode 2"],
    skip: Float[Tensor, " output"],
    past: Float[Tensor, "batch past d_model"],
    state: Float[Tensor, "batch d_head d_head head mode 2"],
    *,
    backend: str = "auto",
) -> tuple[
    Float[Tensor, "batch read"],
    Float[Tensor, "batch past d_model"],
    Float[Tensor, "batch d_head d_head head mode 2"],
]:
    """Response to the next token, and the states after it.

    Args:
        q: Query.
        k: Key.
        v: Value.
        weights: Filter of the keys as ``taps.flip(-1).mT``, contiguous: the weight of the oldest
            key comes first, as in ``past``.
        log_a: Logarithm of the transition of the diagonal SSM.
        b: Input vector of the diagonal SSM.
        c: Output vector of the diagonal SSM, one or more readouts of every head.
        skip: Skip connection of each output of the diagonal SSM.
        past: Keys before this one.
        state: State of the diagonal SSM before this token.
        backend: Backend that must run the call; ``"auto"`` chooses one.

    Returns:
        ``d_model`` channels for each readout, in the dtype of ``q``; the latest keys; the state.
    """
    inputs = (q, k, v, weights, log_a, b, c, skip, past, state)
    return dispatch(OP, "h3_core_step", *inputs, backend=backend)


def h3_core_stepper(
    weights: Float[Tensor, "taps d_model"],
    log_a: Float[Tensor, "#head mode 2"],
    b: Float[Tensor, "head mode 2"],
    c: Float[Tensor, "output mode 2"],
    skip: Float[Tensor, " output"],
    *,
    backend: str = "auto",
) -> Stepper:
    """Prepare :func:`h3_core_step` for many tokens without gradients.

    What follows from the weights alone is computed here once, and the states change in place.

    Args:
        weights: Filter of the keys, as in :func:`h3_core_step`.
        log_a: Logarithm of the transition of the diagonal SSM.
        b: Input vector of the diagonal SSM.
        c: Output vector of the diagonal SSM.
        skip: Skip connection of each output of the diagonal SSM.
        backend: Backend that must run the steps; ``"auto"`` chooses one.

    Returns:
        ``stepper(q, k, v, past, state)`` returns the output for one token, and changes ``past`` and
        ``state``. It does not follow later changes of the weights.
    """
    return dispatch(OP, "h3_core_stepper", weights, log_a, b, c, skip, backend=backend)
