"""What a staircase computes, and what its relatives have in common."""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import (
    LSTM,
    S4D,
    AnyLayer,
    Attention,
    CachedStaircase,
    Feedback,
    FeedForward,
    Ladder,
    Residual,
    SlidingAttention,
    Stack,
    Staircase,
    nbytes,
)
from stateline.layers.compose import checkpoint_activations
from stateline.layers.context import Context
from stateline.layers.mixers.attention import AttentionState
from stateline.layers.state import replace_rows, trim

WIDTH = 8
SHAPES = [(1, 4), (2, 3), (3, 2), (4, 1), (2, 20)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def block(layer: AnyLayer) -> Stack:
    parts = (layer, FeedForward(WIDTH))
    return Stack(*(Residual(part, nn.LayerNorm(WIDTH)) for part in parts)).double()


def attention(n: int = 2) -> Stack:
    return Stack(*(block(Attention(WIDTH, position="rope")) for _ in range(n))).double()


def slides(*kv_heads: int) -> Stack:
    layers = (SlidingAttention(WIDTH, n_heads=2, n_kv_heads=n) for n in kv_heads)
    return Stack(*(block(layer) for layer in layers))


def example(length: int) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=torch.float64)


def by_passes(layer: Attention, x: Tensor, passes: int, chunk_len: int, cached: int) -> Tensor:
    """The equations, chunk by chunk and pass by pass, for a core that is one attention.

    Pass n of chunk i has as keys and values pass n + i - j of the chunks j before it, or the final
    pass, where that is less.
    """
    chunks = list(x.split(chunk_len, dim=1))
    done: dict[tuple[int, int], Tensor] = {(i, 0): chunk for i, chunk in enumerate(chunks)}
    for i, n in itertools.product(range(len(chunks)), range(1, passes + 1)):
        older = range(max(0, i + n - cached), i)
        # What a chunk j is at pass m is what goes into the core there: its output at m - 1. Of a
        # chunk that has left, it is what came out at last.
        given = [done[j, min(n + i - j - 1, passes)] for j in older]
        seen = torch.cat([*given, done[i, n - 1]], dim=1)
        start = max(0, i + n - cached) * chunk_len
        positions = start + torch.arange(seen.shape[1])[None]
        q, k, v, _ = layer._project(seen, positions)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(layer.d_head)
        mask = torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        y = layer.out_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
        done[i, n] = y[:, -chunks[i].shape[1] :]
    return torch.cat([done[i, passes] for i in range(len(chunks))], dim=1)


@pytest.mark.parametrize(("passes", "chunk_len"), SHAPES)
def test_a_staircase_is_its_equations(passes: int, chunk_len: int) -> None:
    core, x = Attention(WIDTH, position="rope").double(), example(11)
    wanted = by_passes(core, x, passes, chunk_len, cached=passes)
    torch.testing.assert_close(Staircase(core, passes=passes, chunk_len=chunk_len)(x), wanted)


@pytest.mark.parametrize(("passes", "chunk_len"), SHAPES)
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_cached_staircase_is_its_equations(passes: int, chunk_len: int, more: int) -> None:
    core, x = Attention(WIDTH, position="rope").double(), example(11)
    layer = CachedStaircase(core, passes=passes, chunk_len=chunk_len, steps=passes + more)
    wanted = by_passes(core, x, passes, chunk_len, cached=passes + more)
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("core", [Attention, S4D, LSTM])
def test_one_pass_is_the_core_on_each_chunk_by_itself(core: type[AnyLayer]) -> None:
    layer, x = core(WIDTH).double(), example(10)
    wanted = torch.cat([layer(chunk) for chunk in x.split(4, dim=1)], dim=1)
    torch.testing.assert_close(Staircase(layer, passes=1, chunk_len=4)(x), wanted)


@pytest.mark.parametrize("core", [Attention, S4D, LSTM])
def test_one_pass_of_a_chunk_that_holds_everything_is_the_core(core: type[AnyLayer]) -> None:
    layer, x = core(WIDTH).double(), example(10)
    torch.testing.assert_close(Staircase(layer, passes=1, chunk_len=10)(x), layer(x))
    torch.testing.assert_close(Ladder(layer, passes=1)(x), layer(x))


@pytest.mark.parametrize(("passes", "chunk_len"), SHAPES)
def test_a_cache_of_as_many_steps_as_passes_is_the_plain_staircase(
    passes: int, chunk_len: int
) -> None:
    core, x = attention(), example(13)
    cached = CachedStaircase(core, passes=passes, chunk_len=chunk_len, steps=passes)
    plain = Staircase(core, passes=passes, chunk_len=chunk_len)
    torch.testing.assert_close(cached(x), plain(x))


def test_a_cache_without_end_is_one_that_outlasts_the_sequence() -> None:
    core, x = attention(), example(13)
    endless = CachedStaircase(core, passes=2, chunk_len=3, steps=None)
    long = CachedStaircase(core, passes=2, chunk_len=3, steps=20)
    torch.testing.assert_close(endless(x), long(x))


@pytest.mark.parametrize(("length", "calls"), [(12, 6), (13, 7), (2, 3)])
def test_wavefronts_are_as_many_as_chunks_and_passes_less_one(
    length: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, made = S4D(WIDTH).double(), []
    forward, forward_chunk = core.forward, core.forward_chunk
    monkeypatch.setattr(core, "forward", lambda x: made.append(x) or forward(x))
    monkeypatch.setattr(core, "forward_chunk", lambda *xs: made.append(xs) or forward_chunk(*xs))
    layer = Staircase(core, passes=3, chunk_len=3)
    layer(example(length))
    assert len(made) == calls
    made.clear()
    layer.forward_chunk(example(length), layer.init_state(2))
    assert len(made) == calls


def reach(layer: AnyLayer, length: int = 25) -> int:
    """How far back the last output depends on an input."""
    x = example(length).requires_grad_()
    (grad,) = torch.autograd.grad(layer.double()(x)[:, -1].sum(), x)
    return length - 1 - int(grad.abs().amax(dim=(0, 2)).nonzero()[0])


def test_recurrence_reaches_further_than_any_window() -> None:
    assert reach(Ladder(block(SlidingAttention(WIDTH, window=3)), passes=2)) == 4
    assert reach(Staircase(attention(1), passes=2, chunk_len=2)) == 24
    assert reach(CachedStaircase(attention(1), passes=1, chunk_len=2, steps=2)) == 24
    assert reach(Feedback(attention(1), window=2)) == 24


@pytest.mark.parametrize(
    "layer",
    [
        Staircase(S4D(WIDTH), passes=3, chunk_len=4),
        Staircase(attention(1), passes=2, chunk_len=4),
        CachedStaircase(attention(1), passes=1, chunk_len=4, steps=6),
        Ladder(block(SlidingAttention(WIDTH, window=8)), passes=3),
    ],
    ids=["staircase(s4d)", "staircase", "cached_staircase", "ladder(sliding)"],
)
@pytest.mark.slow
def test_a_state_is_as_large_after_ten_thousand_tokens_as_after_a_hundred(layer: AnyLayer) -> None:
    layer = layer.float()
    with torch.no_grad():
        state = layer.forward_chunk(torch.randn(1, 100, WIDTH), layer.init_state(1))[1]
        early = nbytes(state)
        for _ in range(99):
            state = layer.forward_chunk(torch.randn(1, 100, WIDTH), state)[1]
    assert nbytes(state) == early == layer.state_bytes(10_000)


class Counted(Attention):
    """Counts its states that are still in use."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def attend(self, *inputs: Any, **options: Any) -> tuple[Tensor, Context]:
        y, seen = super().attend(*inputs, **options)
        return y, Context(self.count(seen.k), seen.v)

    def forward_chunk(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        y, after = super().forward_chunk(x, state)
        return y, after._replace(k=self.count(after.k))

    def count(self, k: Tensor) -> Tensor:
        self.most = max(self.most, sum(old() is not None for old in self.made))
        self.made.append(weakref.ref(k))
        return k


@pytest.mark.parametrize("wrapper", [Staircase, CachedStaircase])
def test_a_long_piece_leaves_no_more_states_than_passes(wrapper: type[AnyLayer]) -> None:
    core = Counted().double()
    layer = wrapper(core, passes=2, chunk_len=2)
    with torch.no_grad():
        layer.forward_chunk(example(40), layer.init_state(2))
    assert len(core.made) == 21
    assert core.most <= 3


def test_a_global_cache_grows_by_every_token() -> None:
    layer = CachedStaircase(attention(1), passes=1, chunk_len=4, steps=None)
    assert layer.state_bytes(300) - layer.state_bytes(200) == 100 * 2 * WIDTH * 8


def test_a_trimmed_global_cache_holds_no_more_than_its_longest_row() -> None:
    layer = CachedStaircase(attention(1), passes=2, chunk_len=4, steps=None)
    state = layer.init_state(2, capacity=5)
    with torch.no_grad():
        for segment in range(6):  # rows take turns in beginning anew, as in training
            fresh = torch.tensor([segment % 2 == 0, segment % 2 == 1])
            state = replace_rows(trim(state), fresh, layer.init_state(2))
            y, state = layer.forward_chunk(x := example(6), state)
    assert trim(state).cache[0].slots == int(state.length.max()) == 12
    torch.testing.assert_close(y[1], layer(x)[1])


@pytest.mark.cpu
def test_a_step_in_place_needs_a_free_slot_in_a_cache_without_end() -> None:
    layer = CachedStaircase(attention(1), passes=1, chunk_len=4, steps=None)
    state = layer.init_state(2, capacity=1)
    layer.step_(example(1)[:, 0], state)
    with pytest.raises(InputError, match="no free slot left"):
        layer.step_(example(1)[:, 0], state)


@pytest.mark.parametrize(
    "core",
    [
        lambda: Attention(WIDTH),
        lambda: Staircase(Attention(WIDTH), passes=2, chunk_len=2),
        lambda: CachedStaircase(Attention(WIDTH), passes=1, chunk_len=2, steps=None),
    ],
    ids=["attention", "staircase", "cached_staircase(steps=none)"],
)
def test_pieces_and_steps_in_place_take_turns(core: Callable[[], AnyLayer]) -> None:
    layer, x = Staircase(core(), passes=2, chunk_len=4).double(), example(16)
    state, outputs = layer.init_state(2, capacity=16), []
    with torch.no_grad():
        for turn, piece in enumerate(x.split([4, 2, 1, 4, 3, 2], dim=1)):
            if turn % 2:
                y, state = layer.forward_chunk(piece, state)
            else:
                y = torch.stack([layer.step_(x_t, state) for x_t in piece.unbind(dim=1)], dim=1)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x))


def test_feedback_mixes_all_levels_of_the_token_before() -> None:
    """With a window of one, the softmax over memories is 1: what is read is the memory itself."""
    core = SlidingAttention(WIDTH, window=1, includes_self=False).double()
    layer, x = Feedback(core, window=1).double(), example(2)
    with torch.no_grad():
        layer.mixture.copy_(torch.tensor([0.3, -0.2]))
        share = layer.mixture.softmax(dim=0)
        value = core.kv_proj.weight[WIDTH:]
        memory = share[0] * x[:, 0]  # what the first token attends to is nothing
        torch.testing.assert_close(layer(x)[:, 1], memory @ value.T @ core.out_proj.weight.T)


def test_shared_projections_are_there_once() -> None:
    def core() -> Stack:
        return Stack(*(block(SlidingAttention(WIDTH)) for _ in range(3)))

    own, shared = Feedback(core()).double(), Feedback(core(), shared=True).double()
    spared = sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in shared.parameters())
    assert spared == 2 * 2 * WIDTH * WIDTH
    assert 3 * nbytes(shared.init_state(1).memory) == nbytes(own.init_state(1).memory)


@pytest.mark.parametrize("wrapper", [CachedStaircase, Feedback])
def test_a_core_that_cannot_attend_to_a_context_is_refused_by_name(
    wrapper: type[AnyLayer],
) -> None:
    with pytest.raises(InputError, match=r"got S4D; staircase takes any core"):
        wrapper(Stack(attention(1), block(S4D(WIDTH))))


@pytest.mark.parametrize("wrapper", [CachedStaircase, Feedback])
def test_a_core_in_which_nothing_attends_is_refused(wrapper: type[AnyLayer]) -> None:
    with pytest.raises(InputError, match="at least one attention or sliding_attention"):
        wrapper(Stack(FeedForward(WIDTH), FeedForward(WIDTH)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CachedStaircase(attention(), passes=3, steps=2), "steps must be at least passes"),
        (lambda: Feedback(attention(), shared=True), "needs sliding_attention"),
        (lambda: Feedback(slides(2, 1), shared=True), r"key heads, got \[\(1, 4\), \(2, 4\)\]"),
        (lambda: Feedback(block(SlidingAttention(WIDTH, window=1))), "contains no memory"),
        (lambda: SlidingAttention(WIDTH, n_heads=3), "n_heads must divide d_model"),
        (lambda: SlidingAttention(6, n_heads=2, position="rope"), "must be even, got 3"),
        (lambda: SlidingAttention(8, d_head=5, position="rope"), "must be even, got 5"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], AnyLayer], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda core: Staircase(core, passes=3, chunk_len=2),
        lambda core: CachedStaircase(core, passes=2, chunk_len=2, steps=4),
        lambda core: Ladder(core, passes=3),
        lambda core: Feedback(core, window=2),
    ],
    ids=["staircase", "cached_staircase", "ladder", "feedback"],
)
def test_recomputing_each_pass_keeps_less_and_changes_nothing(
    wrap: Callable[[AnyLayer], AnyLayer],
) -> None:
    stack, x = Stack(wrap(attention())).double(), example(48)

    def run() -> tuple[list[Tensor], int]:
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = stack(x)
        return list(torch.autograd.grad(y.square().sum(), list(stack.parameters()))), kept

    gradients, all_kept = run()
    checkpoint_activations(stack, True)
    again, kept = run()
    checkpoint_activations(stack, False)
    assert kept < all_kept / 3
    for found, wanted in zip(again, gradients, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_window_is_attention_as_long_as_it_holds_everything() -> None:
    full, slide = (
        Attention(WIDTH, position="rope").double(),
        SlidingAttention(WIDTH, window=9, position="rope").double(),
    )
    with torch.no_grad():
        q, kv = full.qkv.weight.split([WIDTH, 2 * WIDTH])
        slide.q_proj.weight.copy_(q)
        slide.kv_proj.weight.copy_(kv)
        slide.out_proj.weight.copy_(full.out_proj.weight)
    x = example(9)
    torch.testing.assert_close(slide(x), full(x))
    assert not torch.allclose(slide(example(12)), full(example(12)))


@pytest.mark.parametrize("chunk_len", [3, 4, 7])
def test_a_staircase_does_not_grow_though_it_is_larger_late_in_a_chunk(chunk_len: int) -> None:
    layer = Staircase(attention(1), passes=1, chunk_len=chunk_len)
    assert layer.state_bytes(2 * chunk_len + 1) > layer.state_bytes(chunk_len)
    assert not layer.state_grows
    assert Ladder(attention(1)).state_grows


def test_without_passes_the_memory_is_the_input() -> None:
    torch.manual_seed(0)
    core = SlidingAttention(8, n_heads=2, window=9).double()
    layer = CachedStaircase(Stack(core, core), passes=0, chunk_len=1, steps=None)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    keys = [core.project_context(x, torch.arange(6)[None].expand(2, -1)) for _ in range(2)]
    for t in range(6):
        h = x[:, t : t + 1]
        for memory in keys:
            place = torch.full((2, 1), t)
            h, _ = core.attend(h, place, memory.part(0, t), torch.full((2,), t))
        torch.testing.assert_close(layer(x)[:, t : t + 1], h)


def test_a_state_with_room_for_more_than_its_passes_is_refused() -> None:
    layer = Staircase(Attention(8, n_heads=2), passes=2, chunk_len=3)
    state = layer.init_state(1, capacity=4)
    with pytest.raises(InputError, match=r"have room for up to 6, got 1099511627776"):
        layer.forward_chunk(torch.zeros(1, 4, 8), state._replace(room=torch.tensor([1 << 40])))
