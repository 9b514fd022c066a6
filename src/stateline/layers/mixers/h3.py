"""H3: two state space models and two multiplicative gates, designed for recall."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, records
from stateline.layers.derived import derived
from stateline.layers.mixers.adjacent import from_adjacent, to_adjacent
from stateline.layers.mixers.diagonal_ssm import DiagonalSSM, DiagonalSSMState
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.shift_ssm import ShiftSSM
from stateline.ops import H3CoreState, H3Weights, h3_core, h3_core_step, h3_core_stepper
from stateline.ops.discretization import Discretization
from stateline.ops.hippo import Init
from stateline.ops.stepping import Stepper


class H3State(NamedTuple):
    """States of the shift SSM on the keys, and of the diagonal SSM on the products."""

    shift: FiniteFilterState
    diagonal: DiagonalSSMState


class H3(SequenceLayer[H3State]):
    r"""Hungry Hungry Hippos: linear attention with state space models instead of the sum.

    .. math::
        y = W_o \left( q \odot \mathrm{SSM}_{\mathrm{diag}}(
        \mathrm{SSM}_{\mathrm{shift}}(k) \odot v ) \right)

    with projections q, k, v of the input. In heads wider than one, the product of the shifted key
    and the value is an outer product, and the query contracts the axis of the key. The shift SSM
    combines a key with the next token; the diagonal SSM stores the pair. The state has a constant
    size.

    Args:
        d_model: Width of input and output.
        d_state: Real size of the state of each shift SSM (one per channel) and of each diagonal
            SSM (one per head, applied to ``d_head**2`` products).
        d_head: Width of a head; must divide ``d_model``.
        n_ssm: Number of different A and B of the diagonal SSMs; head h uses number ``h % n_ssm``.
            By default every head has its own.
        n_outputs: Signals read from each diagonal SSM; the last projection takes all of them.
        init: Frequencies of the diagonal SSM: ``lin``, ``inv`` or ``legs``.
        discretization: Discretization of the diagonal SSM: ``bilinear`` or ``zoh``.
        dt_min: Smallest initial step of the diagonal SSM.
        dt_max: Largest initial step of the diagonal SSM.
        max_len: If given, the model around the layer refuses longer sequences; the layer itself
            does not change. Use it for weights of an official layer with ``l_max``.

    Raises:
        InputError: If ``d_head`` does not divide ``d_model``, ``n_ssm`` does not divide the number
            of heads, or a number is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2 and algorithm 1.
    """

    # Differs from official code with l_max, which cuts both filters of longer sequences, but not
    # the recurrence. Since the two then disagree, longer sequences are refused.
    def __init__(  # noqa: PLR0913
        self,
        d_model: int,
        *,
        d_state: int = 64,
        d_head: int = 1,
        n_ssm: int | None = None,
        n_outputs: int = 1,
        init: Init = "lin",
        discretization: Discretization = "bilinear",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        max_len: int | None = None,
    ) -> None:
        super().__init__(d_model)
        if d_head < 1 or d_model % d_head:
            raise InputError(f"d_head must divide d_model, got {d_head=} and {d_model=}")
        if max_len is not None and max_len < 1:
            raise InputError(f"max_len must be at least 1, got {max_len=}")
        self.d_head, self.n_outputs, self.max_len = d_head, n_outputs, max_len
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.shift = ShiftSSM(d_model, d_state=d_state)
        self.diagonal = DiagonalSSM(
            d_model // d_head,
            d_state=d_state,
            n_ssm=n_ssm,
            n_outputs=n_outputs,
            init=init,
            discretization=discretization,
            dt_min=dt_min,
            dt_max=dt_max,
        )
        self.out_proj = nn.Linear(n_outputs * d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> H3State:  # noqa: ARG002
        """Zero states; the diagonal SSM has one per product of a key entry and a value entry."""
        products = self.diagonal.init_state(batch_size * self.d_head**2).h
        h = products.unflatten(0, (batch_size, self.d_head, self.d_head))
        return H3State(self.shift.init_state(batch_size), DiagonalSSMState(h))

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Project, apply the shift SSM, the gates and the diagonal SSM, and project again."""
        q, k, v = to_adjacent(self.qkv, x).chunk(3, dim=-1)
        y, _ = h3_core(q, k, v, self.weights())
        return from_adjacent(self.out_proj, y)

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: H3State
    ) -> tuple[Float[Tensor, "batch length d_model"], H3State]:
        """Continue from a state."""
        q, k, v = to_adjacent(self.qkv, x).chunk(3, dim=-1)
        y, (past, h) = h3_core(q, k, v, self.weights(), _inner(state))
        after = H3State(FiniteFilterState(past), DiagonalSSMState(h))
        return from_adjacent(self.out_proj, y), after

    def step(
        self, x: Float[Tensor, "batch d_model"], state: H3State
    ) -> tuple[Float[Tensor, "batch d_model"], H3State]:
        """Process one token."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y, (past, h) = h3_core_step(q, k, v, self.weights(), _inner(state))
        return self.out_proj(y), H3State(FiniteFilterState(past), DiagonalSSMState(h))

    def step_(
        self, x: Float[Tensor, "batch d_model"], state: H3State
    ) -> Float[Tensor, "batch d_model"]:
        """Process one token; the state is changed in place."""
        if records(x):
            return super().step_(x, state)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out_proj(self.stepper()(q, k, v, _inner(state)))

    @derived
    def weights(self) -> H3Weights:
        """Weights of the core."""
        return H3Weights(self.shift.taps(), self.diagonal.weights(), self.diagonal.skip)

    @derived
    def stepper(self) -> Stepper:
        """Steps in place of the core, with the present weights."""
        return h3_core_stepper(self.weights())

    def flops_per_token(self, length: int) -> float:
        """Operations of the projections, of both state space models and of the gates."""
        mixing = self.shift.flops_per_token(length)
        mixing += self.d_head**2 * self.diagonal.flops_per_token(length)
        gates = (1 + 2 * self.n_outputs) * self.d_model * self.d_head
        return super().flops_per_token(length) + mixing + gates


def _inner(state: H3State) -> H3CoreState:
    """The state as the op takes it."""
    return H3CoreState(state.shift.past, state.diagonal.h)
