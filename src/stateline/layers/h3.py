"""H3: two state space models and two gates, made to compare and recall."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers.base import SequenceLayer
from stateline.layers.diagonal_ssm import DiagonalSSM, DiagonalSSMState
from stateline.layers.finite_filter import FiniteFilterState
from stateline.layers.shift_ssm import ShiftSSM
from stateline.ops.discretization import Discretization
from stateline.ops.hippo import Init


class H3State(NamedTuple):
    """States of the shift SSM on the keys, and of the diagonal SSM on the products."""

    shift: FiniteFilterState
    diagonal: DiagonalSSMState


class H3(SequenceLayer[H3State]):
    r"""Hungry Hungry Hippos: linear attention with state space models in place of the sum.

    .. math::
        y = W_o \left( q \odot \mathrm{SSM}_{\mathrm{diag}}(
        \mathrm{SSM}_{\mathrm{shift}}(k) \odot v ) \right)

    with projections q, k, v of the input. Heads wider than one use the outer product of the shifted
    key and the value, and the query contracts the key's axis. The shift SSM lets a key meet the
    token after it; the diagonal SSM keeps the pair. The state has a constant size.

    Args:
        d_model: Width of input and output.
        d_state: Real size of the state of each shift SSM (one per channel) and of each diagonal
            SSM (one per head, applied to ``d_head**2`` products).
        d_head: Width of a head; must divide ``d_model``.
        n_ssm: Number of different A and B of the diagonal SSMs; head h has number ``h % n_ssm``. By
            default one each.
        n_outputs: Signals read from each diagonal SSM, all of which the last projection sees.
        init: Frequencies of the diagonal SSM: ``lin``, ``inv`` or ``legs``.
        discretization: Of the diagonal SSM: ``bilinear`` or ``zoh``.
        dt_min: Smallest initial step of the diagonal SSM.
        dt_max: Largest initial step of the diagonal SSM.
        max_len: With a number, the model around the layer takes no longer sequences; the layer
            itself is the same. It is for weights of an official layer with ``l_max``.

    Raises:
        InputError: If ``d_head`` does not divide ``d_model``, ``n_ssm`` does not divide the number
            of heads, or a number is not positive.

    References:
        Fu et al., "Hungry Hungry Hippos", ICLR 2023, section 3.2 and algorithm 1.
    """

    # Differs from official code with l_max, which cuts off both filters of longer sequences, but
    # not the recurrence: since the two then disagree, longer sequences are not taken.
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
        """Zero states; the diagonal SSM has one for each product of a key and a value entry."""
        products = self.diagonal.init_state(batch_size * self.d_head**2).h
        h = products.unflatten(0, (batch_size, self.d_head, self.d_head))
        return H3State(self.shift.init_state(batch_size), DiagonalSSMState(h))

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Write products of shifted keys and values, remember them, read them with the query."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self._read(q, self.diagonal(self._write(self.shift(k), v)))

    def forward_chunk(
        self, x: Float[Tensor, "batch length d_model"], state: H3State
    ) -> tuple[Float[Tensor, "batch length d_model"], H3State]:
        """The same after a state."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, shift = self.shift.forward_chunk(k, state.shift)
        kv, diagonal = self.diagonal.forward_chunk(self._write(k, v), state.diagonal)
        return self._read(q, kv), H3State(shift, diagonal)

    def step(
        self, x: Float[Tensor, "batch d_model"], state: H3State
    ) -> tuple[Float[Tensor, "batch d_model"], H3State]:
        """The same for one token."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, shift = self.shift.step(k, state.shift)
        kv, diagonal = self.diagonal.step(self._write(k, v), state.diagonal)
        return self._read(q, kv), H3State(shift, diagonal)

    def flops_per_token(self, length: int) -> float:
        """Projections, both state space models, and the gates."""
        mixing = self.shift.flops_per_token(length)
        mixing += self.d_head**2 * self.diagonal.flops_per_token(length)
        gates = (1 + 2 * self.n_outputs) * self.d_model * self.d_head
        return super().flops_per_token(length) + mixing + gates

    def _write(
        self, k: Float[Tensor, "batch *length d_model"], v: Float[Tensor, "batch *length d_model"]
    ) -> Float[Tensor, "batch d_head d_head *length head"]:
        """Outer product of key and value in each head: key entry first, then value entry."""
        return self._split(k)[:, :, None] * self._split(v)[:, None]

    def _read(
        self,
        q: Float[Tensor, "batch *length d_model"],
        kv: Float[Tensor, "batch d_head d_head *length output"],
    ) -> Float[Tensor, "batch *length d_model"]:
        """Contract the key entries with the query, and mix the heads."""
        q = self._split(q).tile(self.n_outputs)  # every signal of a head is read by its query
        o = (q[:, :, None] * kv).sum(dim=1)  # (batch, d_head, *length, output)
        # Differs from the official PyTorch path, which flattens wider heads as (entry, head):
        # algorithm 1 and the fused kernel order them as (head, entry), as the queries are.
        return self.out_proj(o.movedim(1, -1).flatten(-2))

    def _split(
        self, x: Float[Tensor, "batch *length d_model"]
    ) -> Float[Tensor, "batch d_head *length head"]:
        """Entries of each head as an axis of their own; channel = head * d_head + entry."""
        return x.unflatten(-1, (-1, self.d_head)).movedim(-1, 1)
