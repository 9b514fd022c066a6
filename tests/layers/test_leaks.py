"""Layers with a planted leak each, of numbers that are not finite: the law must find it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stateline.layers import NOT_CAUSAL, AnyLayer, SequenceLayer
from stateline.layers.law import check_layer
from stateline.layers.law.case import Case
from stateline.layers.law.containment import nothing_leaks
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.ops import containment, use_backend
from tests.layers.test_modes import PATTERNS

CLAUSE = "inf and NaN stay in their document"
WIDTH, KEPT = 3, 0.5


class Memory(SequenceLayer[Tensor]):
    """A decaying sum, which begins anew with each document."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> Tensor:
        return torch.zeros(batch_size, WIDTH, dtype=self.weight.dtype)

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        outputs = [x[:, :0]]
        for t, x_t in enumerate(x.unbind(dim=1)):
            if starts is not None:
                state = self.begun(state, starts.mask[:, t, None])
            state = self.following(state, x_t)
            outputs.append((self.weight * state)[:, None])
        return torch.cat(outputs, dim=1), state.clone()

    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return state.masked_fill(begins, 0.0)

    def following(self, state: Tensor, x: Tensor) -> Tensor:
        return KEPT * state + x


class MultipliesAtStarts(Memory):
    """Zero times the state where a document begins."""

    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return state * ~begins


class DecaysToZeroAtStarts(Memory):
    """A decay of exp(-1e9) where a document begins."""

    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return state * begins.to(state.dtype).mul(-torch.inf).nan_to_num(0.0, neginf=-1e9).exp()


class MixesRows(Memory):
    """Zero times the other rows."""

    def following(self, state: Tensor, x: Tensor) -> Tensor:
        return KEPT * state + x + 0 * x.sum(dim=0)


class MultipliesTheGradient(Memory):
    """Selects forward; the gradient of the state is multiplied by zero."""

    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return _Begun.apply(state, begins)


class _Begun(torch.autograd.Function):
    """Selects forward and multiplies backward."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, begins: Tensor) -> Tensor:
        ctx.save_for_backward(begins)
        return state.masked_fill(begins, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ~ctx.saved_tensors[0], None


class AddsZeroTimesTheRow(Memory):
    """Zero times all tokens, later ones and those of other documents."""

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        return y + 0.0 * x.sum(dim=1, keepdim=True), after


class Whole(Memory):
    """All tokens by one product with a matrix that is zero between documents, and above."""

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        return self.weight * self.sums(x, state, starts), after if x.shape[1] else y.new_zeros(0)

    def decays(self, x: Tensor, starts: Any) -> tuple[Tensor, Tensor]:
        """Decays between all tokens (batch, t, s), and of the state (batch, t)."""
        place = torch.arange(x.shape[1])
        document = torch.zeros(x.shape[:2]) if starts is None else starts.mask.cumsum(1)
        same = document[:, :, None] == document[:, None]
        between = torch.where(same, KEPT ** (place[:, None] - place).clamp(min=0), 0.0).tril()
        since = torch.where(document == 0, KEPT ** (place + 1), 0.0)
        return between.to(x.dtype), since.to(x.dtype)

    def sums(self, x: Tensor, state: Tensor, starts: Any) -> Tensor:
        between, since = self.decays(x, starts)
        return between @ x + since[..., None] * state[:, None]


class ByFourier(Whole):
    """One transform of all tokens, later ones, too; documents as above."""

    def sums(self, x: Tensor, state: Tensor, starts: Any) -> Tensor:
        if starts is not None or not x.shape[1]:
            return super().sums(x, state, starts)
        n, (between, since) = 2 * x.shape[1], self.decays(x, None)
        impulse = between[:, :, 0].double()
        product = torch.fft.rfft(x.double(), n=n, dim=1) * torch.fft.rfft(impulse, n=n)[..., None]
        y = torch.fft.irfft(product, n=n, dim=1)[:, : x.shape[1]].to(x.dtype)
        return y + since[..., None] * state[:, None]


class ReadsTheLast(Memory):
    """Zero times the last token, backwards in time, constant to gradients."""

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        return y + 0 * x[:, -1:].detach(), after


class SubtractsSums(Whole):
    """Sums of a document as the difference of two sums of the row."""

    def sums(self, x: Tensor, state: Tensor, starts: Any) -> Tensor:
        grown = x * KEPT ** -torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        total = torch.cat([state[:, None] * KEPT, grown], dim=1).cumsum(dim=1)
        place = torch.arange(x.shape[1]).expand(x.shape[:2])
        first = 0 * place if starts is None else (place * starts.mask).cummax(1).values
        begun = first > 0 if starts is None else starts.mask.cumsum(1) > 0
        before = total.gather(1, first[..., None].expand_as(x)) * begun[..., None]
        return (total[:, 1:] - before) * KEPT ** place.to(x.dtype)[..., None]


class ScalesByTheRow(Memory):
    """Divides by the largest entry of a row, and multiplies by it again."""

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        largest = x.detach().abs().amax(dim=(1, 2), keepdim=True) + 1 if x.shape[1] else 1.0
        return y / largest * largest, after


class MultipliesWhatAChunkBeginsWith(Memory):
    """Selects in a chunk; zero times the state that it begins with."""

    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        if starts is not None and x.shape[1]:
            later = starts.mask.clone()
            later[:, 0] = False
            state, starts = state * ~starts.mask[:, :1], SimpleNamespace(mask=later)
        return super().forward_chunk(x, state, starts)


class MixesRowsInSteps(Memory):
    """Zero times the other rows, in decoding alone."""

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, after = super().step(x, state)
        return y + 0 * x.sum(dim=0), after


class MixesRowsInStepsInPlace(Memory):
    """Zero times the other rows, in the state of steps in place alone."""

    def step_(self, x: Tensor, state: Tensor) -> Tensor:
        y, after = super().step(x, state)
        state.copy_(after + 0 * x.sum(dim=0))
        return y


class OutputState(NamedTuple):
    """State of the core, and its last output."""

    core: Tensor
    last: Tensor


class AddsThePrevious(SequenceLayer[OutputState]):
    """A wrapper: adds its core's previous output, of the same document."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.core = Memory()

    def init_state(self, batch_size: int, *, capacity: int = 0) -> OutputState:
        state = self.core.init_state(batch_size)
        return OutputState(state, state.clone())

    def forward_chunk(
        self, x: Tensor, state: OutputState, starts: Any = None
    ) -> tuple[Tensor, OutputState]:
        y, core = self.core.forward_chunk(x, state.core, starts=starts)
        outputs = torch.cat([state.last[:, None], y], dim=1)
        previous = outputs[:, :-1]
        if starts is not None:
            previous = self.begun(previous, starts.mask[..., None])
        return y + previous, OutputState(core, outputs[:, -1].clone())

    def begun(self, previous: Tensor, begins: Tensor) -> Tensor:
        return previous.masked_fill(begins, 0.0)


class WrapperMultiplies(AddsThePrevious):
    """Zero times what a wrapper remembers, where a document begins."""

    def begun(self, previous: Tensor, begins: Tensor) -> Tensor:
        return previous * ~begins


LEAKS: list[Callable[[], AnyLayer]] = [
    MultipliesAtStarts,
    DecaysToZeroAtStarts,
    MixesRows,
    MultipliesTheGradient,
    AddsZeroTimesTheRow,
    Whole,
    ByFourier,
    ReadsTheLast,
    SubtractsSums,
    ScalesByTheRow,
    MultipliesWhatAChunkBeginsWith,
    MixesRowsInSteps,
    MixesRowsInStepsInPlace,
    WrapperMultiplies,
]


def broken(layer: AnyLayer) -> list[str]:
    report = check_layer(layer, chunks=(4, 2, 3), length=0)
    return [finding.clause for finding in report.findings if not finding.ok]


@pytest.mark.parametrize("layer", [Memory, AddsThePrevious])
def test_a_layer_that_selects_is_right(layer: Callable[[], AnyLayer]) -> None:
    assert broken(layer()) == []


def test_the_law_finds_fourteen_leaks_that_finite_numbers_do_not_show() -> None:
    found = {leak: broken(leak()) for leak in LEAKS}
    assert len(found) == 14
    assert all(found.values())
    assert all(CLAUSE in clause for clauses in found.values() for clause in clauses)


SELECT = {"aft", "channel_mixing", "feed_forward", "feedback", "lstm", "moe", "slstm"}
"""Layers whose own code selects, on PyTorch's backend."""


@pytest.mark.slow
def test_the_law_finds_the_leak_of_each_layer_whose_ops_do_not_contain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containment, "_is_finite", lambda _: True)
    tight = set[str]()
    with use_backend("torch"):
        for name in PATTERNS.keys() - NOT_CAUSAL:
            layer = build_stack(ModelConfig(PATTERNS[name], vocab_size=2, d_model=8)).double()
            case = Case(layer.eval(), layer.example_input(2, 9), (4, 2, 3), torch.float64)
            tight |= {name} if all(finding.ok for finding in nothing_leaks(case)) else set()
    assert tight == SELECT
