"""Packed rows: documents in one row do not see each other, and the law finds what leaks."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stateline import InputError
from stateline.layers import (
    LAYERS,
    LSTM,
    Attention,
    Bidirectional,
    Mamba,
    SequenceLayer,
    Stack,
    accumulates,
)
from stateline.layers.compose import checkpoint_activations
from stateline.layers.documents import CALL, Documents, _borders
from stateline.layers.law import check_layer
from stateline.layers.law.case import Case
from stateline.layers.law.packing import packed_rows_agree
from stateline.layers.state import select_rows, trim
from stateline.models.build import build_stack
from stateline.models.config import ModelConfig
from stateline.models.factory import make_model
from stateline.models.presets import configure
from stateline.models.sequence_head import ClassifierConfig, RegressorConfig
from stateline.ops import use_backend
from tests.test_examples import example

WIDTH = 4

LAW = example("packing_law")

STARTS = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1, 0, 0]]).bool()


def _separately(layer: Any, x: Tensor, starts: Tensor) -> Tensor:
    rows = []
    for row, begins in zip(x, starts, strict=True):
        places = [0, *(begins.nonzero().flatten().tolist()), len(begins)]
        places = sorted({*places})
        parts = pairwise(places)
        rows.append(torch.cat([layer(row[None, a:b]) for a, b in parts], dim=1))
    return torch.cat(rows)


@accumulates("h", "keys", "total")
class ReaderState(NamedTuple):
    """What a reader remembers of its document."""

    h: Tensor
    before: Tensor
    window: Tensor
    keys: Tensor
    total: Tensor
    position: Tensor


Leak = Callable[["Reader", str, str, Tensor], Tensor]


class Reader(SequenceLayer[ReaderState]):
    """Scan, filter, window, keys, normalisation and positions, and resets of its own."""

    keeps_float32 = True

    def __init__(self, leak: Leak | None = None) -> None:
        super().__init__(WIDTH)
        self.leak = leak
        self.start = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(4, WIDTH))

    def init_state(self, batch_size: int, *, capacity: int = 0) -> ReaderState:
        h, none = self.start.repeat(batch_size, 1), self.start.new_zeros(batch_size, WIDTH)
        keys, window = none.new_zeros(batch_size, WIDTH, WIDTH), torch.stack([none] * 3, dim=1)
        position = torch.zeros(batch_size, dtype=torch.int64)
        return ReaderState(h, none, window, keys, none.clone(), position)

    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        return self._read(x, self.init_state(len(x)), starts, "forward")[0]

    def forward_chunk(
        self, x: Tensor, state: ReaderState, starts: Documents | None = None
    ) -> tuple[Tensor, ReaderState]:
        return self._read(x, state, starts, "forward_chunk")

    def _read(
        self, x: Tensor, state: ReaderState, starts: Documents | None, verb: str
    ) -> tuple[Tensor, ReaderState]:
        outputs = []
        begins = torch.zeros(x.shape[:2], dtype=torch.bool) if starts is None else starts.starts
        masks = dict.fromkeys(state._fields, begins)
        if starts is not None and self.leak is not None:
            masks = {name: self.leak(self, verb, name, begins) for name in state._fields}
        for t, x_t in enumerate(x.to(self.weight.dtype).unbind(dim=1)):
            state = self._reset(state, {name: mask[:, t] for name, mask in masks.items()})
            y, state = self._next(x_t, state)
            outputs.append(y)
        return torch.stack(outputs, dim=1).to(x.dtype), state

    def _reset(self, state: ReaderState, begins: dict[str, Tensor]) -> ReaderState:
        initial = self.init_state(len(state.h))
        parts = {
            name: torch.where(
                begins[name].view(-1, *[1] * (old.ndim - 1)), getattr(initial, name), old
            )
            for name, old in state._asdict().items()
        }
        return ReaderState(**parts)

    def _next(self, x: Tensor, state: ReaderState) -> tuple[Tensor, ReaderState]:
        h = 0.7 * state.h + x
        window = torch.cat([state.window[:, 1:], x[:, None]], dim=1)
        keys = state.keys + state.before[:, :, None] * x[:, None]
        total, position = state.total + x * x, state.position + 1
        features = (
            h * position[:, None].to(h.dtype).cos(),
            state.before + x,
            window.amax(dim=1),
            (keys * x[:, :, None]).sum(1) / (total + 1).sqrt() / position[:, None],
        )
        y = (torch.stack(features, dim=1) * self.weight).sum(1)
        return y, ReaderState(h, x.clone(), window, keys, total, position)


def _unless(field: str) -> Leak:
    return lambda _, __, name, begins: begins & (name != field)


def _verb(which: str) -> Leak:
    return lambda _, verb, __, begins: begins & (verb != which)


def _changed(change: Callable[[Tensor], Tensor]) -> Leak:
    return lambda _, __, ___, begins: change(begins)


def _within(change: Callable[[Tensor], Tensor]) -> Leak:
    """Changes starts inside rows alone."""
    return _changed(lambda begins: torch.cat([begins[:, :1], change(begins)[:, 1:]], dim=1))


def _at(place: int, value: bool) -> Leak:
    def change(begins: Tensor) -> Tensor:
        begins = begins.clone()
        begins[:, place] = value
        return begins

    return _changed(change)


LEAKS: dict[str, Leak] = {
    "scan": _unless("h"),
    "halo of the convolution": _unless("before"),
    "window": _unless("window"),
    "cached keys": _unless("keys"),
    "normalisation": _unless("total"),
    "position": _unless("position"),
    "forward resets nothing": _verb("forward"),
    "forward_chunk resets nothing": _verb("forward_chunk"),
    "scan, in forward_chunk alone": lambda _, verb, name, begins: (
        begins & (verb != "forward_chunk" or name != "h")
    ),
    "keys, in forward alone": lambda _, verb, name, begins: (
        begins & (verb != "forward" or name != "keys")
    ),
    "one position late": _within(lambda begins: begins.roll(1, dims=1)),
    "one position early": _within(lambda begins: begins.roll(-1, dims=1)),
    "starts of the first row in all rows": _changed(lambda begins: begins[:1].expand_as(begins)),
    "starts of another row": _changed(lambda begins: begins.roll(1, dims=0)),
    "the first start of a row alone": _changed(lambda begins: begins & (begins.cumsum(1) <= 1)),
    "the last start of a row alone": _changed(
        lambda begins: begins & (begins.flip(1).cumsum(1).flip(1) <= 1)
    ),
    "documents of one token": _within(lambda begins: begins & ~begins.roll(1, dims=1)),
    "a start at the last position": _at(-1, False),
    "carried state enters a new document": _at(0, False),
    "a document that continues loses its state": _at(0, True),
    "documents begin in pairs of rows": _changed(lambda begins: begins.all(0).expand_as(begins)),
    "blocks of four tokens": _changed(
        lambda begins: begins & (torch.arange(begins.shape[1]) % 4 == 0)
    ),
}


def test_a_layer_that_resets_by_itself_keeps_the_law() -> None:
    torch.manual_seed(0)
    assert check_layer(Reader()).ok


def _packs(layer: Reader, dtype: torch.dtype = torch.float64) -> bool:
    """Whether the clauses about packed rows hold."""
    torch.manual_seed(0)
    layer = layer.to(dtype)
    case = Case(layer, layer.example_input(2, 13), (5, 8), dtype)
    return all(finding.ok for finding in packed_rows_agree(case))


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("leak", LEAKS)
def test_the_law_finds_a_planted_leak(leak: str, dtype: torch.dtype) -> None:
    assert not _packs(Reader(LEAKS[leak]), dtype)


class Forgets(Reader):
    """Begins documents with zeros instead of the learned state, or cuts its gradient off."""

    def __init__(self, begin: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.begin = begin

    def _reset(self, state: ReaderState, begins: dict[str, Tensor]) -> ReaderState:
        after = super()._reset(state, begins)
        learned = begins["h"][:, None]
        return after._replace(h=torch.where(learned, self.begin(after.h), after.h))


class Fades(Reader):
    """Keeps a millionth of the past."""

    def _reset(self, state: ReaderState, begins: dict[str, Tensor]) -> ReaderState:
        after = super()._reset(state, begins)
        return after._replace(h=after.h + torch.where(begins["h"][:, None], 1e-6 * state.h, 0))


class LeavesAnotherState(Reader):
    """Outputs are right, but the state after packed rows is not the one after the last document."""

    def forward_chunk(
        self, x: Tensor, state: ReaderState, starts: Documents | None = None
    ) -> tuple[Tensor, ReaderState]:
        y, after = super().forward_chunk(x, state, starts)
        return y, after if starts is None else after._replace(position=after.position + 1)


@pytest.mark.parametrize(
    "layer",
    [Forgets(torch.zeros_like), Forgets(Tensor.detach), Fades(), LeavesAnotherState()],
    ids=str,
)
def test_the_law_finds_a_wrong_beginning_or_end(layer: Reader) -> None:
    assert not _packs(layer)


def test_the_diagnosis_names_what_leaks() -> None:
    torch.manual_seed(0)
    halo = check_layer(Reader(_unless("before"))).diagnosis
    assert halo == "forward with starts sees the document before, first at its position 0"
    late = check_layer(Reader(_verb("forward_chunk"))).diagnosis
    assert late == "forward_chunk with starts sees the document before, first at its position 0"
    assert "does not reset the state" in check_layer(Reader(_unless("position"))).diagnosis


BEGINS_ANEW = (
    "attention(position=alibi)",
    "attention(position=rope)",
    "diagonal_ssm",
    "gated_delta_net(d_conv=3)",
    "gated_delta_net(gated=false)",
    "gated_delta_net(n_products=2)",
    "h3(d_head=2)",
    "kimi_delta_attention",
    "lightning_attention",
    "linear_attention",
    "mamba(d_state=5)",
    "mamba2(d_state=5)",
    "mamba3(d_state=4, mimo_rank=2)",
    "mlstm",
    "retention",
    "rg_lru",
    "rwkv7",
    "shift_ssm",
)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    "backend", ["numba", "torch", pytest.param("reference", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("pattern", BEGINS_ANEW)
def test_kernels_begin_documents_anew(pattern: str, backend: str) -> None:
    torch.manual_seed(0)
    layer = build_stack(configure(pattern, vocab_size=1, d_model=8)).double().eval()
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    with use_backend(backend):
        outputs = layer(x, starts=STARTS), _separately(layer, x, STARTS)
        _, state = layer.forward_chunk(x, layer.init_state(2), starts=STARTS)
        _, alone = layer.forward_chunk(x[:1, 7:], layer.init_state(1))
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(trim(select_rows(state, [0])), trim(alone))
    weights = [x, *layer.parameters()]
    found, wanted = (torch.autograd.grad((y * y).sum(), weights) for y in outputs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.slow
@pytest.mark.parametrize("pattern", [*LAYERS, *LAW.HYBRIDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_is_separate(pattern: str, dtype: torch.dtype) -> None:
    assert all(finding.ok for finding in LAW.findings(pattern, dtype))


def test_rows_of_layers_that_are_not_causal_pack() -> None:
    torch.manual_seed(0)
    layer = Stack(Bidirectional(Mamba(WIDTH)), Mamba(WIDTH)).double()
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(layer(x, starts=STARTS), _separately(layer, x, STARTS))


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("begins", [((0,), (), (5,), (2, 7)), ((0,), (), (), (0,))], ids=str)
def test_each_row_continues_its_own_state_or_begins_anew(begins: Sequence[Sequence[int]]) -> None:
    torch.manual_seed(0)
    layer = LSTM(WIDTH).double()
    x, warm = torch.randn(2, len(begins), 8, WIDTH, dtype=torch.float64)
    _, state = layer.forward_chunk(warm, layer.init_state(len(x)))
    starts = torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, places in enumerate(begins):
        starts[row, list(places)] = True
    y, after = layer.forward_chunk(x, state, starts=starts)
    for row, places in enumerate(begins):
        own, outputs = select_rows(state, [row]), []
        for a, b in pairwise(sorted({0, *places, 8})):
            own = layer.init_state(1) if a in places else own
            part, own = layer.forward_chunk(x[row : row + 1, a:b], own)
            outputs.append(part)
        torch.testing.assert_close(y[row : row + 1], torch.cat(outputs, dim=1))
        torch.testing.assert_close(select_rows(after, [row]), own)


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [(ModelConfig, {}), (ClassifierConfig, {"n_classes": 3}), (RegressorConfig, {"n_values": 2})],
)
def test_positions_and_pooling_begin_anew(kind: type[ModelConfig], outputs: dict[str, int]) -> None:
    torch.manual_seed(0)
    config = configure("attention", kind, d_model=8, max_len=6, vocab_size=9, **outputs)
    model = make_model(config).double().eval()
    x = torch.randint(9, (2, 8))
    found = model(x, starts=STARTS)
    torch.testing.assert_close(found, _separately(model, x, STARTS))
    _, state = model.forward_chunk(x[:, :2], model.init_state(2))
    _, after = model.forward_chunk(x, state, starts=STARTS)
    assert after.position.tolist() == [1, 3]


def test_a_document_may_not_be_longer_than_learned_positions() -> None:
    model = make_model(configure("attention", vocab_size=9, d_model=8, max_len=5))
    x = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(InputError, match="max_len=5"):
        model(x, starts=torch.zeros(2, 8, dtype=torch.bool))
    _, state = model.forward_chunk(x[:, :4], model.init_state(2))
    with pytest.raises(InputError, match="max_len=5"):
        model.forward_chunk(x, state, starts=STARTS)
    model(x, starts=STARTS)


def test_the_state_keeps_its_room() -> None:
    layer = Attention(WIDTH).eval()
    x = torch.randn(2, 8, WIDTH)
    _, state = layer.forward_chunk(x, layer.init_state(2, capacity=3))
    _, after = layer.forward_chunk(x, state, starts=STARTS)
    assert after.length.tolist() == [1, 3]
    assert after.k.shape[1] - 3 >= 3


def test_activation_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = make_model(configure("h3 attention", vocab_size=9, d_model=8))
    x, gradients = torch.randint(9, (2, 8)), []
    for on in (False, True):
        checkpoint_activations(model.stack, on)
        model.zero_grad()
        model(x, starts=STARTS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_compiled_model_reads_packed_rows() -> None:
    torch.manual_seed(0)
    model = make_model(configure("mamba2 attention", vocab_size=9, d_model=8))
    x, weights = torch.randint(9, (2, 8)), list(model.parameters())
    outputs = model(x, starts=STARTS), torch.compile(model)(x, starts=STARTS)
    torch.testing.assert_close(*outputs)
    found, wanted = (torch.autograd.grad(y.square().mean(), weights) for y in outputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize("starts", [STARTS.int(), STARTS[:1], STARTS[:, :3], [0, 3]])
def test_starts_must_fit_the_input(starts: Any) -> None:
    with pytest.raises(InputError, match=r"starts must be true at .* \(2, 8\)"):
        Attention(WIDTH)(torch.zeros(2, 8, WIDTH), starts=starts)


@pytest.mark.parametrize("pattern", ["h3", "diagonal_ssm", "mamba2"])
def test_a_chunk_of_no_tokens_leaves_the_state(pattern: str) -> None:
    layer = build_stack(configure(pattern, vocab_size=1, d_model=8)).eval()
    with torch.no_grad():
        _, state = layer.forward_chunk(torch.randn(2, 5, 8), layer.init_state(2))
        _, after = layer.forward_chunk(torch.randn(2, 0, 8), state)
    torch.testing.assert_close(after, state, rtol=0, atol=0)


def test_empty_inputs_have_no_documents() -> None:
    layer = Attention(WIDTH)
    none = torch.zeros(2, 0, dtype=torch.bool)
    assert layer(torch.zeros(2, 0, WIDTH), starts=none).shape == (2, 0, WIDTH)
    x = torch.zeros(0, 3, WIDTH)
    assert layer(x, starts=torch.zeros(0, 3, dtype=torch.bool)).shape == x.shape


def test_batches_of_documents_cost_least() -> None:
    lengths, counts = np.array([1, 2, 60, 61, 400]), np.array([500, 40, 3, 7, 1])
    cuts = [c for n in range(5) for c in combinations(range(1, 5), n)]

    def cost(borders: Sequence[int]) -> int:
        pairs = list(pairwise(borders))
        read = sum(counts[a:b].sum() * lengths[b - 1] for a, b in pairs)
        return int(read) + CALL * len(pairs)

    found = _borders(lengths, counts.cumsum()).tolist()
    assert cost(found) == min(cost([0, *inner, 5]) for inner in cuts)


def test_every_token_is_read_once() -> None:
    starts = torch.rand(8, 256, generator=torch.Generator().manual_seed(0)) < 0.05
    documents = Documents(starts, starts.device)
    for layout in (documents.whole, documents.with_states):
        assert sum(int(group.lengths.sum()) for group in layout.groups) == starts.numel()
        x = torch.arange(starts.numel()).view(starts.shape)
        assert layout.apply(x, lambda _, part: part).equal(x)
