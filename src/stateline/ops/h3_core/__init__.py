"""The core of H3 between its projections: whole sequences, chunks and single steps."""

from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from stateline.ops.bound import Backend, bound, checked_step, step_of
from stateline.ops.containment import contained
from stateline.ops.declared import precise_weights
from stateline.ops.diagonal_ssm import DiagonalWeights, example_weights
from stateline.ops.op import Example, Op, Sizes
from stateline.ops.stepping import Stepper


class H3Weights(NamedTuple):
    """Weights of the core of H3.

    Attributes:
        taps: Causal filter of the keys, including its skip connection.
        diagonal: Diagonal SSM of each head, which has one or more readouts.
        skip: Skip connection of each output of the diagonal SSM.
    """

    taps: Float[Tensor, "d_model taps"]
    diagonal: DiagonalWeights
    skip: Float[Tensor, " output"]


class H3CoreState(NamedTuple):
    """State of the core of H3.

    Attributes:
        past: The latest keys, one fewer than the filter has taps; the oldest comes first.
        h: State of the diagonal SSMs, of each pair of a key entry and a value entry.
    """

    past: Float[Tensor, "batch past d_model"]
    h: Float[Tensor, "batch d_head d_head channel mode 2"]


def example(sizes: Sizes, taps: int = 64, modes: int = 32) -> Example:
    """Heads of one channel, filters and states of 64 numbers."""
    q, k, v = (sizes.signal() for _ in range(3))
    weights = H3Weights(
        sizes.weight(sizes.d_model, taps) / taps**0.5,
        example_weights(sizes.d_model, modes, sizes),
        sizes.weight(sizes.d_model),
    )
    return Example((q, k, v, weights, None), sizes.positions * (modes * 12.0 + taps * 2.0))


OP = Op(__name__, ["numba", "triton"], example)


def _heads_fit(q: Tensor, weights: H3Weights, state: H3CoreState | None = None) -> str:
    """Why the sizes do not fit each other, or an empty string."""
    d_model, heads, outputs = q.shape[-1], len(weights.diagonal.b), len(weights.diagonal.c)
    if not heads or d_model % heads or not outputs or outputs % heads:
        return (
            "the heads must divide the channels and the outputs of the diagonal SSMs, got "
            f"{heads} heads, {d_model} channels and {outputs} outputs"
        )
    if wrong := precise_weights(weights.diagonal):
        return wrong
    if state is None:
        return ""
    wanted = weights.taps.shape[1] - 1, d_model // heads
    found = state.past.shape[1], state.h.shape[1]
    if found != wanted:
        return f"the state needs {wanted[0]} past keys and d_head = {wanted[1]}, got {found}"
    return ""


@bound(OP, _heads_fit)
@contained()
def h3_core(
    q: Float[Tensor, "batch length d_model"],
    k: Float[Tensor, "batch length d_model"],
    v: Float[Tensor, "batch length d_model"],
    weights: H3Weights,
    state: H3CoreState | None = None,
    *,
    starts: Bool[Tensor, "batch length"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length read"], Any]:
    r"""Filter the keys, gate the values, run a diagonal SSM, and gate by the queries.

    .. math:: y = q \odot \mathrm{SSM}_{\mathrm{diag}}(\mathrm{filter}(k) \odot v)

    Channel ``head * d_head + entry`` of q, k and v belongs to a head. Wider heads (``d_head > 1``)
    use the outer product of filtered key and value, one diagonal SSM input for each pair of
    entries, and the query contracts the key axis.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        weights: Taps of the filter, the diagonal SSM, as in :func:`diagonal_ssm`, and its skip
            connection.

    Returns:
        ``d_model`` channels for each readout, in the dtype of ``q``, and the state after the chunk:
        ``None`` if no state was given, for it would have to be computed.

    Example:
        The filter delays keys by one token, so a key lets the next value into the state, which
        never decays.

        >>> import torch
        >>> k = torch.tensor([[[1.0], [0.0], [0.0]]])
        >>> v = torch.tensor([[[5.0], [7.0], [9.0]]])
        >>> zero, half = torch.zeros(1, 1, 2), torch.tensor([[[0.5, 0.0]]])
        >>> diagonal = DiagonalWeights(zero, 2 * half, half)
        >>> weights = H3Weights(torch.tensor([[0.0, 1.0]]), diagonal, torch.zeros(1))
        >>> y, _ = h3_core(torch.ones(1, 3, 1), k, v, weights)
        >>> y.flatten().round().abs()
        tensor([0., 7., 7.])

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2 and algorithm 1.
    """
    return backend(q, k, v, weights, state, starts=starts)


h3_core_step = step_of(OP, h3_core)


@bound(OP)
def h3_core_stepper(weights: H3Weights, *, backend: Backend = "auto") -> Stepper:
    """Prepare :func:`h3_core_step` for many tokens without gradients.

    Values that depend only on the weights are computed here once; the states change in place.

    Args:
        weights: Weights.

    Returns:
        ``stepper(q, k, v, state)`` returns the output for one token, and changes ``state``. It does
        not follow later changes of the weights.
    """
    step = backend(weights)
    return checked_step(
        step, h3_core_step, weights, lambda q, k, v, state: (q, k, v, weights, state)
    )
