"""H3: two state space models and two multiplicative gates, designed for recall."""

from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer, records
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents, mask_of
from stateline.layers.linear import Linear
from stateline.layers.mixers.adjacent import from_adjacent, to_adjacent
from stateline.layers.mixers.diagonal_ssm import DiagonalSSM, DiagonalSSMState
from stateline.layers.mixers.finite_filter import FiniteFilterState
from stateline.layers.mixers.shift_ssm import ShiftSSM
from stateline.layers.mixers.ssm_settings import DiagonalSettings
from stateline.ops import H3CoreState, H3Weights, h3_core, h3_core_step, h3_core_stepper
from stateline.ops.stepping import Stepper
from stateline.settings import Count


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
        d_head: Width of a head; must divide ``d_model``.
        max_len: If given, the model around the layer refuses longer sequences; the layer itself
            does not change. Use it for weights of an official layer with ``l_max``.
        **settings: Settings of the diagonal SSM, which each head applies to ``d_head**2`` products:
            :class:`~stateline.layers.mixers.ssm_settings.DiagonalSettings`. Of these, ``d_state``
            is also the size of the shift SSM's state; ``n_ssm`` counts over heads, not channels.

    Raises:
        InputError: If ``d_head`` does not divide ``d_model``, ``n_ssm`` does not divide the number
            of heads, or a number is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2 and algorithm 1.
    """

    settings: DiagonalSettings

    # Differs from official code with l_max, which cuts both filters of longer sequences, but not
    # the recurrence. Since the two then disagree, longer sequences are refused.
    def __init__(
        self, d_model: int, *, d_head: Count = 1, max_len: Count | None = None, **settings: Any
    ) -> None:
        super().__init__(d_model, **settings)
        if d_model % d_head:
            raise InputError(f"d_head must divide d_model, got {d_head=} and {d_model=}")
        self.d_head, self.max_len, self.n_outputs = d_head, max_len, self.settings.n_outputs
        self.qkv = Linear(d_model, [d_model] * 3)
        self.shift = ShiftSSM.with_settings(self.settings, d_model)
        self.diagonal = DiagonalSSM.with_settings(self.settings, d_model // d_head)
        self.out_proj = Linear(self.n_outputs * d_model, d_model)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> H3State:  # noqa: ARG002
        """Zero states; the diagonal SSM has one per product of a key entry and a value entry."""
        products = self.diagonal.init_state(batch_size * self.d_head**2).h
        h = products.unflatten(0, (batch_size, self.d_head, self.d_head))
        return H3State(self.shift.init_state(batch_size), DiagonalSSMState(h))

    def resets(self, x: Tensor, state: H3State | None = None) -> bool:  # noqa: ARG002
        """Whether the kernels take documents."""
        simple = x.device.type == "cpu" or self.d_head * self.n_outputs == 1
        return simple and self.diagonal.resets(x)

    @override
    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        q, k, v = to_adjacent(self.qkv, x).chunk(3, dim=-1)
        y, _ = h3_core(q, k, v, self.weights(), starts=mask_of(starts))
        return from_adjacent(self.out_proj, y)

    @override
    def forward_chunk(
        self, x: Tensor, state: H3State, starts: Documents | None = None
    ) -> tuple[Tensor, H3State]:
        q, k, v = to_adjacent(self.qkv, x).chunk(3, dim=-1)
        y, (past, h) = h3_core(q, k, v, self.weights(), _inner(state), starts=mask_of(starts))
        after = H3State(FiniteFilterState(past), DiagonalSSMState(h))
        return from_adjacent(self.out_proj, y), after

    @override
    def step(self, x: Tensor, state: H3State) -> tuple[Tensor, H3State]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y, (past, h) = h3_core_step(q, k, v, self.weights(), _inner(state))
        return self.out_proj(y), H3State(FiniteFilterState(past), DiagonalSSMState(h))

    @override
    def step_(self, x: Tensor, state: H3State) -> Tensor:
        if not self.decodes and records(x):
            return super().step_(x, state)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out_proj(self.stepper()(q, k, v, _inner(state)))

    @prepared
    def weights(self) -> H3Weights:
        """Weights of the core."""
        return H3Weights(self.shift.taps(), self.diagonal.weights(), self.diagonal.skip)

    @prepared
    def stepper(self) -> Stepper:
        """Steps in place of the core, with the present weights."""
        return h3_core_stepper(self.weights())

    def flops_per_token(self, length: int) -> float:
        """Operations of the projections, of both state space models and of the gates."""
        copies = self.d_head**2 - 1  # the diagonal SSM runs for each product of a head
        mixing = copies * self.diagonal.flops_per_token(length)
        gates = (1 + 2 * self.n_outputs) * self.d_model * self.d_head
        return super().flops_per_token(length) + mixing + gates


def _inner(state: H3State) -> H3CoreState:
    """The state as the op takes it."""
    return H3CoreState(state.shift.past, state.diagonal.h)
