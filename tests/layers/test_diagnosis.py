"""Every planted bug is caught under its clause, and named rightly in one sentence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stateline.layers import SequenceLayer, Stack
from stateline.layers.law import check_layer
from stateline.layers.law.case import Case
from stateline.layers.law.precision import precision
from stateline.layers.law.report import explained
from tests.layers import test_law as planted
from tests.layers.test_law import BUGS, Twin, check


class ChunkIgnoresItsState(Twin):
    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, _ = super().forward_chunk(x, self.init_state(len(x)))
        return y, super().forward_chunk(x, state)[1]


class StepIgnoresItsState(Twin):
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, _ = super().step(x, self.init_state(len(x)))
        return y, super().step(x, state)[1]


class StateNotCarried(Twin):
    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, _ = super().forward_chunk(x, state)
        return y, pytree.tree_map(torch.clone, state)


class ForwardSeesTwoAhead(Twin):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3 * x.roll(-2, dims=1)


class ChunkOfAnotherScale(Twin):
    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return 1.001 * y, state


class ChunkMakesItsStateHalf(Twin):
    def forward_chunk(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().forward_chunk(x, state)
        return y, state._replace(h=state.h.half())


class DropoutInEvaluation(Twin):
    clause = "results depend on the arguments alone"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1))


class RandomInitialState(Twin):
    clause = "results depend on the arguments alone"

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        state = super().init_state(batch_size, capacity=capacity)
        return state._replace(h=torch.randn_like(state.h))


class StateInFloat32(Twin):
    def init_state(self, batch_size: int, *, capacity: int = 0) -> Any:
        state = super().init_state(batch_size, capacity=capacity)
        return state._replace(h=state.h.float())


SAID: dict[type[Twin], str] = {
    ChunkIgnoresItsState: "forward_chunk ignores its state",
    StepIgnoresItsState: "step ignores its state",
    StateNotCarried: "forward_chunk returns its state as it was: nothing is carried on",
    ForwardSeesTwoAhead: "forward at position t sees x[t+2]",
    DropoutInEvaluation: "forward draws random numbers",
    RandomInitialState: "init_state draws random numbers",
    StateInFloat32: "init_state makes h of the state torch.float32 in a layer of torch.float64",
    ChunkMakesItsStateHalf: "forward_chunk returns h of the state as torch.float16, but init_state "
    "makes it torch.float64",
    ChunkOfAnotherScale: "forward_chunk from an initial state is not forward, first at position 0",
    planted.LeakAtOnePosition: "forward at position t sees x[t+1] (t = 7)",
    planted.LeakInTraining: "in training mode, forward at position t sees x[t+",
    planted.LeakInChunks: "forward_chunk at position t sees x[t+1]",
    planted.StateChangedInPlace: "forward_chunk changes its input state: position",
    planted.StateChangedInPlaceByAStep: "step changes its input state: h",
    planted.InputChangedInPlace: "forward changes its input",
    planted.InputChangedByAChunk: "forward_chunk changes its input",
    planted.InputChangedByAStepInPlace: "step_ changes its input",
    planted.StateSharesMemory: "the state that forward_chunk returns shares memory with its input",
    planted.InitialStateIsShared: "init_state returns the same memory every time",
    planted.RowsMixed: "forward mixes rows",
    planted.RowsMixedInTheState: "forward_chunk mixes rows in its state: h",
    planted.PositionStaysInAStep: "step returns another state than forward_chunk of one token: pos",
    planted.PositionAdvancesByOneInAChunk: "forward_chunk does not go on where the chunk before "
    "ended: position of two chunks",
    planted.RotaryPositionsOffByOneInPlace: "step_ leaves another state than step",
    planted.PositionOfTheFirstRow: "rows with different numbers of tokens are treated as equally "
    "long: the longer",
    planted.HiddenState: "forward_chunk remembers earlier calls",
    planted.GradientCutBetweenChunks: "forward_chunk passes no gradient through the state that it "
    "returns: h",
    planted.GradientCutBetweenSteps: "step passes no gradient through its state: h",
    planted.GradientIsNotANumber: "the gradient that forward_chunk gives core.weight is not a num",
    planted.InitialStateCut: "init_state or forward_chunk passes no gradient to core.start",
    planted.InitialStateCutEverywhere: "no method passes a gradient to core.start",
    planted.BackwardWrong: "in all methods alike, a gradient is not the derivative of the output: "
    "core.start, core.weight, the input",
    planted.OneUseDetached: "in all methods alike, a gradient is not the derivative of the output: "
    "core.weight",
    planted.TrainingDiffers: "forward computes another function in training mode, without dropout",
    planted.ManyRowsWrong: "forward of 67 rows is not that of 2 rows",
    planted.AccumulatorInHalfPrecision: "in bfloat16, init_state keeps h in half precision",
    planted.AccumulatorCastByAChunk: "in bfloat16, forward_chunk changes a dtype in the state",
    planted.AccumulatorInDoublePrecision: "in bfloat16, forward_chunk changes a dtype in the state",
    planted.OutputInFloat32: "in bfloat16, forward returns float32",
    planted.OutputInFloat32InPlace: "in bfloat16, step_ returns float32",
    planted.OutputWrongInHalfPrecision: "bfloat16 runs, accumulators float32 does not hold: an "
    "error of ",
    planted.OutputTooNarrow: "forward_chunk returns torch.float64 of (2, 13, 1), not torch.float64 "
    "of shape (2, 13, 4)",
    planted.OutputInAnotherDtype: "forward returns torch.float32 of (2, 13, 4), not torch.float64 "
    "of shape (2, 13, 4)",
    planted.OutputAlone: "forward_chunk returns torch.float64 of (2, 13, 4), not a pair of an "
    "output and a state",
    planted.OutputIsNotANumber: "step returns numbers that are not finite",
    planted.StateLargerThanTold: "state_bytes is wrong: told 32, found 40 bytes",
    planted.StateIsAView: "the state keeps the memory of a whole chunk alive",
    planted.GrowthNotTold: "state_bytes is wrong: told 72",
    planted.StepInPlaceDiffers: "step_ returns another output than step",
    planted.StepInPlaceForgets: "step_ leaves its state as it was",
    planted.AgesNotPadded: "states after different numbers of tokens cannot be joined (cat): "
    "InputError: cat_states needs states of one layer on one device, but state 1 has other",
    planted.AgesIgnored: "rows with different numbers of tokens are treated as equally long: the s",
    planted.TensorMissingFromTheStateDict: "a state_dict does not hold the whole layer: neither "
    "parameter nor buffer: scale",
    planted.OnePositionForAllRows: "position of the state has no row for each of 2 sequences: [1]",
    planted.RowSqueezed: "forward_chunk returns torch.float64 of (13, 4), not torch.float64 of "
    "shape (1, 13, 4)",
    planted.RowsShareMemory: "rows of the state that init_state makes share memory, clone them: p",
    planted.OneTokenReadWrongly: "forward_chunk does not go on after a sequence of one token",
    planted.LastBlockOfManyWrong: "forward_chunk of 300 tokens leaves another state than chunks of "
    "13: h",
    planted.LeakInManyTokens: "forward of 300 tokens is not that of chunks of 13, first at "
    "position 64",
    planted.GradientWrongInManyTokens: "gradients: long = short chunks does not hold: ",
    planted.LastDocumentIgnored: "forward_chunk with starts leaves another state than the last "
    "documents: h, position",
    planted.StateBeginsInFloat32: "init_state makes h of the state torch.float32 in a layer of",
    planted.StepRaises: "step raises RuntimeError: no such step",
}


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("bug", SAID)
def test_a_planted_bug_is_caught_and_named(bug: type[Twin]) -> None:
    report = check(bug)
    broken = [finding.clause for finding in report.findings if not finding.ok]
    assert not report.ok
    assert not hasattr(bug, "clause") or bug.clause in broken, str(report)
    assert report.diagnosis.startswith(SAID[bug]), report.diagnosis
    assert str(report).startswith(f"{bug.__name__}: THE LAW IS BROKEN: {report.diagnosis}\n")
    assert "\n" not in report.diagnosis


@pytest.mark.usefixtures("unannotated")
def test_rows_that_are_all_wrong_are_not_blamed_on_their_lengths() -> None:
    (note,) = (f.note for f in check(StepIgnoresItsState).findings if "joined" in f.clause)
    assert note == "all rows come out wrong"


def test_all_planted_bugs_are_named() -> None:
    assert set(BUGS) <= set(SAID)
    assert len(SAID) >= 20


def test_a_diagnosis_leaves_the_layer_alone() -> None:
    torch.manual_seed(0)
    layer = planted.HiddenState()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    check_layer(layer)
    assert not hasattr(layer, "hidden")
    assert all(before[name].equal(value) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(("wrong", "allowed"), [(2, True), (3, False)])
def test_half_precision_of_layers_that_choose_is_judged_by_half_of_the_positions(
    wrong: int, allowed: bool
) -> None:
    """Rounding may change which experts a position uses, but not at most of the positions."""

    class Choosing(SequenceLayer[tuple[()]]):
        chooses = True

        def init_state(self, batch_size: int, *, capacity: int = 0) -> tuple[()]:
            return ()

        def forward_chunk(self, x: Tensor, state: tuple[()]) -> tuple[Tensor, tuple[()]]:
            low = x.dtype is torch.bfloat16
            jumps = torch.arange(x.shape[1])[:, None] < wrong if low else torch.tensor(False)
            return torch.where(jumps, -x, x), state

    (found,) = precision(Case(Choosing(2), torch.ones(1, 5, 2), (5,), torch.float64))
    assert (found.error <= found.limit) is allowed


def test_a_search_for_the_cause_that_raises_does_not_hide_the_error() -> None:
    def causes() -> Iterator[str]:
        yield str(1 / 0)

    assert explained("steps = forward", 0.5, 1e-9, causes()) == ("steps = forward", 0.5, 1e-9, "")


def test_a_cut_in_one_of_several_layers_names_the_field_of_the_state() -> None:
    torch.manual_seed(0)
    stack = Stack(planted.Decay(), planted.GradientCutBetweenChunks())
    said = check_layer(stack).diagnosis
    assert said == "forward_chunk passes no gradient through the state that it returns: [1].h"
    stack = Stack(planted.GradientCutBetweenSteps(), planted.Decay())
    assert check_layer(stack).diagnosis == "step passes no gradient through its state: [0].h"


class Short(Twin):
    max_len = 30


def test_the_report_tells_the_longest_sequence_that_was_checked() -> None:
    assert check_layer(planted.Twin(), length=0).tokens == 13
    assert check_layer(planted.Twin(), length=40).tokens == 40
    assert "the law holds up to 40 tokens" in str(check_layer(planted.Twin(), length=40))
    assert check_layer(Short()).tokens == 17
