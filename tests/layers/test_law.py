"""The law itself: layers with a planted bug each (see ``test_diagnosis``), and right ones."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.layers import Attention, SequenceLayer, accumulates, cat_states, detach
from stateline.layers.documents import Documents
from stateline.layers.law import LawReport, check_layer
from stateline.layers.law.case import Case
from stateline.layers.law.outputs import _cuts
from stateline.layers.mixers.attention import AttentionState
from stateline.ops.positions import rotate

WIDTH = 4


@accumulates("h")
class DecayState(NamedTuple):
    """A decaying sum, and how many tokens it has seen."""

    h: Tensor
    position: Tensor


class Decay(SequenceLayer[DecayState]):
    """A decaying sum with a learned initial value, read by a map that knows the position."""

    keeps_float32 = True

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> DecayState:
        h = self.start.repeat(batch_size, 1)
        return DecayState(h, torch.zeros(batch_size, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def forward_chunk(self, x: Tensor, state: DecayState) -> tuple[Tensor, DecayState]:
        outputs, (h, position) = [], state
        for x_t in x.unbind(dim=1):
            h = 0.7 * h + x_t
            outputs.append(self.weight * h * (1 + position[:, None]).to(h.dtype).cos())
            position = position + 1
        return torch.stack(outputs, dim=1).to(x.dtype), DecayState(h, position)


class Twin(SequenceLayer[Any]):
    """Does what its core does. Each bug below changes one thing, and names the clause it breaks."""

    clause: str

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.core: SequenceLayer[Any] = Decay()

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        return self.core.init_state(batch_size, capacity=capacity)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.forward_chunk(x, state)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.step(x, state)

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return self.core.step_(x, state)

    def state_bytes(self, length: int) -> int:
        return self.core.state_bytes(length)


class AttentionTwin(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.core = Attention(WIDTH, n_heads=2, position="rope")


class LeakAtOnePosition(Twin):
    clause = "no output sees a later input"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[:, 7:8] += 1e-3 * x[:, 8:9].sum(dim=1, keepdim=True)
        return y


class LeakInTraining(Twin):
    """A norm over the batch reads all positions until the model is evaluated."""

    clause = "no output sees a later input, in training"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().forward_chunk(self.norm(x.mT).mT, state)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().step(self.norm(x), state)

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(self.norm(x), state)


class LeakInChunks(Twin):
    clause = "chunks = forward"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return y + 1e-3 * torch.cat([x[:, 1:], x[:, -1:]], dim=1), state


class StateChangedInPlace(Twin):
    clause = "the given state is unchanged"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        result = super().forward_chunk(x, pytree.tree_map(torch.clone, state))
        with torch.no_grad():
            state.position.add_(1)
        return result


class StateChangedInPlaceByAStep(Twin):
    clause = "the given state is unchanged"

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        result = super().step(x, pytree.tree_map(torch.clone, state))
        with torch.no_grad():
            state.h.zero_()
        return result


class InputChangedInPlace(Twin):
    """Without a gradient to the input, PyTorch says nothing."""

    clause = "the given state is unchanged"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach().mul_(0.5) * 2)


class InputChangedByAChunk(Twin):
    """A change that a second call does not make again."""

    clause = "the given state is unchanged"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().forward_chunk(x.detach().relu_(), state)


class InputChangedByAStepInPlace(Twin):
    clause = "the given state is unchanged"

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x.detach().mul_(0.5) * 2, state)


class StateSharesMemory(Twin):
    """A part of the state that never changes is handed on, not copied."""

    clause = "the given state is unchanged"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        return super().init_state(batch_size), torch.ones(batch_size, 1)

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state[0])
        return y, (after, state[1])

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().step(x, state[0])
        return y, (after, state[1])

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x, state[0])

    def state_bytes(self, length: int) -> int:
        return super().state_bytes(length) + 4


class InitialStateIsShared(Twin):
    """Every initial state is the same memory."""

    clause = "every initial state is a fresh one"

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[int, Any] = {}

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        fresh = super().init_state(batch_size)
        h, position = self.shared.setdefault(batch_size, detach(fresh))
        return DecayState(h.to(fresh.h) + 0 * fresh.h, position)


class RowsMixed(Twin):
    clause = "rows do not mix"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 1e-3 * x.mean(dim=0))

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().forward_chunk(x - 1e-3 * x.mean(dim=0), state)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().step(x - 1e-3 * x.mean(dim=0), state)

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x - 1e-3 * x.mean(dim=0), state)


class RowsMixedInTheState(Twin):
    clause = "rows do not mix"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(h=after.h - 1e-3 * after.h.mean(dim=0))


class PositionStaysInAStep(Twin):
    clause = "steps = forward"

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().step(x, state)
        return y, after._replace(position=state.position.clone())


class PositionAdvancesByOneInAChunk(Twin):
    clause = "chunks = forward"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(position=state.position + 1)


class RotaryPositionsOffByOneInPlace(AttentionTwin):
    clause = "step_ = step"

    def step_(self, x: Tensor, state: Any) -> Tensor:
        slot = state.length[:, None, None, None].expand(-1, 1, *state.k.shape[2:]).clone()
        y = super().step_(x, state)
        further = torch.ones(len(x), 1, dtype=torch.int64)
        state.k.scatter_(1, slot, rotate(state.k.gather(1, slot), further, dims=2))
        return y


class PositionOfTheFirstRow(Twin):
    """Right as long as all rows are as old as the first."""

    clause = "states of different lengths can be joined"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        position = state.position[:1].repeat(len(x))
        return super().forward_chunk(x, state._replace(position=position))


class HiddenState(Twin):
    """Goes on from what the layer itself remembers."""

    clause = "rows do not mix"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        self.hidden = super().init_state(batch_size)
        return pytree.tree_map(torch.clone, self.hidden)

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, self.hidden = super().forward_chunk(x, self.hidden)
        return y, pytree.tree_map(torch.clone, self.hidden)


class GradientCutBetweenChunks(Twin):
    clause = "gradients: chunks = forward"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, detach(after)


class GradientCutBetweenSteps(Twin):
    clause = "gradients from a state: steps"

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().step(x, detach(state))


class GradientIsNotANumber(Twin):
    clause = "gradients: chunks = forward"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y + (0 * self.core.weight).sqrt(), after


class InitialStateCut(Twin):
    clause = "gradients: chunks = forward"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        return detach(super().init_state(batch_size))


class InitialStateCutEverywhere(Twin):
    """All verbs agree that the initial state learns nothing."""

    clause = "every parameter gets its gradient"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        return detach(super().init_state(batch_size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward_chunk(x, self.init_state(len(x)))[0]


class Doubled(torch.autograd.Function):
    """Twice its input, with another gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return 3 * grad


class BackwardWrong(Twin):
    """All methods have the same wrong gradient."""

    clause = "gradients are derivatives"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = self.core.forward_chunk(x, state)
        return Doubled.apply(y), after

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.forward_chunk(x[:, None], state)
        return y[:, 0], state

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return SequenceLayer.step_(self, x, state)


class OneUseDetached(BackwardWrong):
    """A weight that is used twice has the gradient of one use."""

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = self.core.forward_chunk(x, state)
        return y + x * self.core.weight.detach(), after


class TrainingDiffers(Twin):
    clause = "training = evaluation"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class ManyRowsWrong(BackwardWrong):
    """A kernel with blocks of 64 rows."""

    clause = "many rows = few rows"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = self.core.forward_chunk(x, state)
        return torch.cat([y[:64], 1.01 * y[64:]]), after


class AccumulatorInHalfPrecision(Twin):
    clause = "bfloat16 runs, accumulators float32"

    def __init__(self) -> None:
        super().__init__()
        self.core.keeps_float32 = False  # type: ignore[misc]


class AccumulatorCastByAChunk(Twin):
    clause = "bfloat16 runs, accumulators float32"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(h=after.h.to(x.dtype))


class AccumulatorInDoublePrecision(Twin):
    """Nothing shows it in float64."""

    clause = "bfloat16 runs, accumulators float32"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(h=after.h.double())


class OutputInFloat32(Twin):
    clause = "bfloat16 runs, accumulators float32"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.to(torch.promote_types(y.dtype, torch.float32))


class OutputInFloat32InPlace(Twin):
    clause = "bfloat16 runs, accumulators float32"

    def step_(self, x: Tensor, state: Any) -> Tensor:
        y = super().step_(x, state)
        return y.to(torch.promote_types(y.dtype, torch.float32))


class OutputWrongInHalfPrecision(Twin):
    clause = "bfloat16 runs, accumulators float32"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.5 if x.dtype == torch.bfloat16 else 1.0)


class OutputTooNarrow(Twin):
    """All methods agree on an output that a residual branch would silently broadcast."""

    clause = "outputs have the right shape"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :1]

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return y[..., :1], state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().step(x, state)
        return y[..., :1], state

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x, state)[..., :1]


class OutputInAnotherDtype(Twin):
    clause = "outputs have the right shape"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class OutputAlone(Twin):
    """Forgets to return the state."""

    clause = "outputs have the right shape"

    def forward_chunk(self, x: Tensor, state: Any) -> Any:
        return super().forward_chunk(x, state)[0]


class OutputIsNotANumber(Twin):
    clause = "outputs have the right shape"

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().step(x, state)
        return y * torch.nan, state


class RowSqueezed(Twin):
    """Loses the axis of rows where there is one row."""

    clause = "outputs have the right shape"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return y.squeeze(0), state


class RowsShareMemory(Twin):
    """A change of one row in place would change all."""

    clause = "outputs have the right shape"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        state = super().init_state(batch_size)
        return state._replace(position=torch.zeros((), dtype=torch.int64).expand(batch_size))


class OneTokenReadWrongly(Twin):
    """Right after a prompt of any other length."""

    clause = "cut anywhere = forward"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        wrong = x.shape[1] == 1 and not state.position.any()
        return y, after._replace(h=after.h * 0.9) if wrong else after


class LastBlockOfManyWrong(Twin):
    """Blocks of 64 tokens, the last of which is not full."""

    clause = "long = short chunks"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        wrong = x.shape[1] > 64 and x.shape[1] % 64
        return y, after._replace(h=after.h * 0.99) if wrong else after


class LeakInManyTokens(Twin):
    """Sees later inputs behind the first block of 64 tokens, whatever the method."""

    clause = "long = short chunks"

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y + 1e-3 * (x.roll(-1, dims=1) * (torch.arange(x.shape[1]) >= 64)[:, None]), after


class GradientWrongInManyTokens(Twin):
    clause = "gradients: long = short chunks"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.shape[1] <= 64 else torch.cat([y[:, :64].detach(), y[:, 64:]], dim=1)


class LastDocumentIgnored(Twin):
    """A document that begins at the last position does not reset the state."""

    clause = "packed = separate, from a state"

    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        return self.core(x, starts=starts)

    def forward_chunk(
        self, x: Tensor, state: Any, starts: Documents | None = None
    ) -> tuple[Tensor, Any]:
        y, after = self.core.forward_chunk(x, state, starts=starts)
        if starts is not None:
            earlier = Documents(starts.starts.clone().index_fill(1, torch.tensor([-1]), False))
            _, after = self.core.forward_chunk(x, state, starts=earlier)
        return y, after


class StateBeginsInFloat32(Twin):
    """Zeros are exact in any precision; the first step in place is not."""

    clause = "every initial state is a fresh one"

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.core.start)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        state = super().init_state(batch_size)
        return state._replace(h=state.h.float())


class StateLargerThanTold(Twin):
    clause = "state_bytes is true"

    def state_bytes(self, length: int) -> int:
        return super().state_bytes(length) - 8


class StateIsAView(Twin):
    clause = "no chunk stays in memory"

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(h=torch.cat([after.h, after.h])[: len(after.h)])


class GrowthNotTold(AttentionTwin):
    clause = "state_bytes is true"

    def state_bytes(self, length: int) -> int:
        return super().state_bytes(1)


class StepInPlaceDiffers(Twin):
    clause = "step_ = step"

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x, state) * (1 + 1e-6)


class StepInPlaceForgets(Twin):
    clause = "step_ = step"

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return self.step(x, state)[0]


class RetypedState(AttentionTwin):
    """Attention with a state of a type of its own."""

    kind: type[Any]

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        return self.kind(*super().init_state(batch_size, capacity=capacity))

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().forward_chunk(x, AttentionState(*state))
        return y, self.kind(*after)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, after = super().step(x, AttentionState(*state))
        return y, self.kind(*after)

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x, AttentionState(*state))


class UnpaddedState(NamedTuple):
    """A cache that does not say how to join rows of different lengths."""

    k: Tensor
    v: Tensor
    length: Tensor


class OneAgeState(NamedTuple):
    """A cache that pads rows, but takes all for as long as the longest."""

    k: Tensor
    v: Tensor
    length: Tensor

    @staticmethod
    def cat(states: Sequence[Any]) -> "OneAgeState":
        k, v, length = cat_states([AttentionState(*state) for state in states])
        return OneAgeState(k, v, length.max().repeat(len(length)))


class RightState(NamedTuple):
    """The same without the bug."""

    k: Tensor
    v: Tensor
    length: Tensor

    @staticmethod
    def cat(states: Sequence[Any]) -> "RightState":
        return RightState(*cat_states([AttentionState(*state) for state in states]))


class RetypedTwin(RetypedState):
    kind = RightState


class AgesNotPadded(RetypedState):
    clause = "states of different lengths can be joined"
    kind = UnpaddedState


class AgesIgnored(RetypedState):
    clause = "states of different lengths can be joined"
    kind = OneAgeState


class ScaledTwin(Twin):
    """Scales its output by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.keep(torch.rand(WIDTH) + 1)

    def keep(self, scale: Tensor) -> None:
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.to(x.dtype)

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return y * self.scale.to(x.dtype), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().step(x, state)
        return y * self.scale.to(x.dtype), state

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return super().step_(x, state) * self.scale.to(x.dtype)


class TensorMissingFromTheStateDict(ScaledTwin):
    clause = "a state_dict loads"

    def keep(self, scale: Tensor) -> None:
        self.scale = scale


class OnePositionForAllRows(Twin):
    """A leaf of the state that has no row per sequence."""

    clause = "Rows do not mix"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        state = super().init_state(batch_size)
        return state._replace(position=state.position[:1])


class StepRaises(Twin):
    clause = "Outputs agree"

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        raise RuntimeError("no such step\n(and much more)")


CORRECT = [Twin, AttentionTwin, RetypedTwin, ScaledTwin]
BUGS = [
    bug
    for bug in list(globals().values())
    if isinstance(bug, type) and issubclass(bug, Twin) and hasattr(bug, "clause")
]


@cache
def check(layer: type[Twin], dtype: torch.dtype = torch.float64) -> LawReport:
    torch.manual_seed(0)
    return check_layer(layer(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layer", CORRECT)
def test_a_layer_without_bugs_passes(layer: type[Twin], dtype: torch.dtype) -> None:
    report = check(layer, dtype)
    assert report.ok, str(report)
    assert report.diagnosis == ""


class Sensitive(Twin):
    """A small difference of two weights, of which little is left once they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.tensor([1.0, 1.0 + 1 / 200]))

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.core.forward_chunk(x, state)
        return y * (self.large[1] - self.large[0]), state

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.forward_chunk(x[:, None], state)
        return y[:, 0], state


def test_rounded_weights_are_not_held_against_a_computation() -> None:
    """In bfloat16, 1 + 1/200 is 1 + 1/128: the difference grows by half, the same for both runs."""
    finding = next(f for f in check_layer(Sensitive()).findings if f.clause.startswith("bfloat16"))
    assert finding.ok, finding


class Estimated(BackwardWrong):
    """An estimate of a gradient, by design."""

    chooses = True


class NormInFloat32(BackwardWrong):
    """Roundings to float32, which all methods share, are larger than the steps of differences."""

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.forward_chunk(x.float().tanh().to(x.dtype), state)


class PartlyInHalf(NormInFloat32):
    """Differences see one branch alone: steps this small change nothing in half precision."""

    dtype = torch.bfloat16

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.forward_chunk(x + x.to(self.dtype).tanh().to(x.dtype), state)


class PartlyInFloat16(PartlyInHalf):
    dtype = torch.float16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layer", [PartlyInHalf, PartlyInFloat16])
def test_gradients_through_half_precision_are_not_judged(layer: type[Twin], seed: int) -> None:
    assert check_layer(layer(), chunks=(2, 2), length=0, seed=seed).ok


@pytest.mark.parametrize("layer", [Estimated, NormInFloat32])
def test_gradients_that_differences_cannot_judge_are_not_refused(layer: type[Twin]) -> None:
    assert check_layer(layer(), length=0).ok


def test_the_way_out_of_an_estimated_gradient_is_told() -> None:
    told = check_layer(BackwardWrong(), chunks=(2, 2), length=0).diagnosis
    assert told.endswith(" (an estimate by design declares chooses = True)")


class Normed(Twin):
    """A weight that training divides by an estimate of its norm, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.forward_chunk(self.map(x), state)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_chunk(x, self.init_state(len(x)))[0]

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.core.step(self.map(x), state)

    def step_(self, x: Tensor, state: Any) -> Tensor:
        return self.core.step_(self.map(x), state)


def test_buffers_that_training_improves_are_no_fault() -> None:
    report = check_layer(Normed(), length=0)
    assert report.ok, str(report)


def test_a_long_sequence_is_cut_at_its_beginning_and_near_borders() -> None:
    case = Case(Twin(), torch.zeros(2, 50, WIDTH), (30, 20), torch.float64)
    assert _cuts(case) == [*range(1, 17), 29, 30, 31, 49]


def test_numbers_of_numpy_are_taken(unannotated: None) -> None:
    sizes = tuple(np.array([4, 3]))
    two, none = np.int64(2), np.int64(0)
    assert check_layer(Twin(), chunks=sizes, batch_size=two, length=none, seed=none).ok


def test_a_leak_is_located() -> None:
    report = check(LeakAtOnePosition)
    notes = {finding.clause: finding.note for finding in report.findings}
    assert notes["no output sees a later input"] == "forward at position t sees x[t+1] (t = 7)"


def test_a_missing_tensor_is_named() -> None:
    report = check(TensorMissingFromTheStateDict)
    notes = {finding.clause: finding.note for finding in report.findings}
    assert notes["a state_dict loads"].endswith("neither parameter nor buffer: scale")


def test_a_parameter_without_its_gradient_is_named() -> None:
    report = check(InitialStateCutEverywhere)
    notes = {finding.clause: finding.note for finding in report.findings}
    assert "gradient to core.start" in notes["every parameter gets its gradient"]


@pytest.mark.parametrize(
    ("layer", "note"),
    [(Twin, "the state is bounded"), (AttentionTwin, "the state grows with the length")],
)
def test_the_table_shows_which_states_grow(layer: type[Twin], note: str) -> None:
    assert str(check(layer)).endswith(f"0e+00  {note}")


def test_an_error_is_shown_in_one_line() -> None:
    lines = str(check(StepRaises)).splitlines()
    (line,) = (line for line in lines if line.startswith("  BROKEN  Outputs agree "))
    assert line.endswith("RuntimeError: no such step")


def test_the_text_of_a_report_is_a_table_with_a_line_per_clause() -> None:
    good, bad = check(Twin), check(StateLargerThanTold)
    first, second, *_ = str(good).splitlines()
    assert first == "Twin: the law holds up to 300 tokens"
    assert second.startswith("  ok      outputs have the right shape ")
    assert str(bad).startswith("StateLargerThanTold: THE LAW IS BROKEN: ")
    last = str(bad).splitlines()[-1]
    assert last.startswith("  BROKEN  state_bytes is true ")
    assert last.endswith("told 32, found 40 bytes")
    assert len(str(good).splitlines()) == 1 + len(good.findings)
    noted = [finding.clause for finding in good.findings if finding.note]
    assert noted == ["no chunk stays in memory", "state_bytes is true"]


def test_checking_changes_neither_the_layer_nor_the_random_state() -> None:
    layer = Twin().train()
    before = [parameter.clone() for parameter in layer.parameters()]
    random_state = torch.get_rng_state()
    check_layer(layer)
    assert layer.training
    assert torch.equal(torch.get_rng_state(), random_state)
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (Twin, {}, "check_layer takes a layer, an instance of"),
        (nn.Linear(4, 4), {}, "check_layer takes a layer, an instance of"),
        (Twin(), {"batch_size": 1}, "batch_size must be at least 2"),
        (Twin(), {"chunks": (5,)}, "chunks must be two or more lengths of at least 1"),
        (Twin(), {"chunks": (5, 0)}, "chunks must be two or more lengths of at least 1"),
        (Twin(), {"chunks": 5}, "chunks must be two or more lengths of at least 1"),
        (Twin(), {"length": -1}, "length must be at least 0, got length=-1"),
        (Twin(), {"length": "long"}, "length must be a whole number, such as 2, got 'long'"),
        (Twin(), {"batch_size": 2.5}, "batch_size must be a whole number, such as 2, got 2.5"),
        (Twin(), {"seed": "x"}, "seed must be a whole number, such as 2, got 'x'"),
        (Twin(), {"seed": 2**70}, "seed must be a whole number, such as 2, got "),
        (Twin(), {"dtype": [3]}, "dtype must be torch.float64 or torch.float32"),
        (Twin(), {"dtype": torch.bfloat16}, "dtype must be torch.float64 or torch.float32"),
    ],
)
@pytest.mark.usefixtures("unannotated")
def test_wrong_arguments_are_not_held_against_the_layer(
    layer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_layer(layer, **options)


class Sum(SequenceLayer[Tensor]):
    """A layer without parameters, in float32."""

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Tensor:
        return torch.zeros(batch_size, self.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(dim=1)

    def forward_chunk(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        total = state[:, None] + x.to(state.dtype).cumsum(dim=1)
        return total.to(x.dtype), total[:, -1].clone()


@pytest.mark.cpu  # which is where a layer without parameters is taken to be
def test_a_layer_without_parameters_can_be_checked() -> None:
    report = check_layer(Sum(WIDTH), dtype=torch.float32)
    assert report.ok, str(report)


class SumInPlace(Sum):
    def forward_chunk(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        result = super().forward_chunk(x, state)
        state.add_(1)
        return result


@pytest.mark.cpu
def test_a_state_that_is_a_tensor_must_stay_unchanged() -> None:
    report = check_layer(SumInPlace(WIDTH), dtype=torch.float32)
    assert report.diagnosis == "forward_chunk changes its input state: the state"
