"""Layers with a planted leak each, of numbers that are not finite: the law must find it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.layers import SequenceLayer
from stateline.layers.law import check_layer

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
    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return state * ~begins


class DecaysToZeroAtStarts(Memory):
    def begun(self, state: Tensor, begins: Tensor) -> Tensor:
        return state * begins.to(state.dtype).mul(-torch.inf).nan_to_num(0.0, neginf=-1e9).exp()


class MixesRows(Memory):
    def following(self, state: Tensor, x: Tensor) -> Tensor:
        return KEPT * state + x + 0 * x.sum(dim=0)


class MultipliesTheGradient(Memory):
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
    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        return y + 0.0 * x.sum(dim=1, keepdim=True), after


class Whole(Memory):
    """Computes all tokens at once."""

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
    def sums(self, x: Tensor, state: Tensor, starts: Any) -> Tensor:
        if starts is not None or not x.shape[1]:
            return super().sums(x, state, starts)
        n, (between, since) = 2 * x.shape[1], self.decays(x, None)
        impulse = between[:, :, 0].double()
        product = torch.fft.rfft(x.double(), n=n, dim=1) * torch.fft.rfft(impulse, n=n)[..., None]
        y = torch.fft.irfft(product, n=n, dim=1)[:, : x.shape[1]].to(x.dtype)
        return y + since[..., None] * state[:, None]


class ReadsTheLast(Memory):
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
    def forward_chunk(self, x: Tensor, state: Tensor, starts: Any = None) -> tuple[Tensor, Tensor]:
        y, after = super().forward_chunk(x, state, starts)
        largest = x.detach().abs().amax(dim=(1, 2), keepdim=True) + 1 if x.shape[1] else 1.0
        return y / largest * largest, after


LEAKS = [
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
]


def broken(layer: SequenceLayer[Tensor]) -> list[str]:
    report = check_layer(layer, chunks=(4, 2, 3), length=0)
    return [finding.clause for finding in report.findings if not finding.ok]


def test_a_layer_that_selects_is_right() -> None:
    assert broken(Memory()) == []


@pytest.mark.parametrize("leak", LEAKS)
def test_the_law_finds_a_leak_that_finite_numbers_do_not_show(leak: type[Memory]) -> None:
    found = broken(leak())
    assert found
    assert all("inf and NaN stay in their document" in clause for clause in found)
