import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import AttentionCache, AttentionMask, attention, attention_step_
from stateline.ops.attention import pytorch
from stateline.ops.positions import UNLIMITED, alibi_slopes, frequencies, hard_alibi_windows

BACKENDS = ["numba", "torch", "reference"]
FASTER = ["numba", "torch"]
LENGTHS = st.sampled_from([1, 2, 3, 5, 8, 13, 17, 31, 40])
BIASES = st.fixed_dictionaries({"slopes": st.booleans(), "windows": st.booleans()})
SCHEMES = [
    {},
    {"slopes": alibi_slopes(3)},
    {"windows": hard_alibi_windows(3, 2)},
    {"slopes": alibi_slopes(3), "windows": hard_alibi_windows(3, 2)},
]


def case(length: int, slots: int | None = None, n_heads: int = 3, batch: int = 2) -> list[Tensor]:
    """Queries, keys, values; float64."""
    generator = torch.Generator().manual_seed(length)
    slots = length if slots is None else slots
    shapes = [(batch, length, n_heads, 4)] + [(batch, slots, n_heads, 4)] * 2
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def run(backend: str) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, start: Any = None, **options: Any) -> Tensor:
        return attention(q, k, v, AttentionMask(start, **options), backend=backend)

    return call


def scheme(n_heads: int, slopes: bool, windows: bool) -> dict[str, Tensor]:
    chosen = {"slopes": alibi_slopes(n_heads)} if slopes else {}
    return chosen | ({"windows": hard_alibi_windows(n_heads, n_heads // 2)} if windows else {})


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_the_definition_is_the_formula(soft_cap: float | None) -> None:
    q, k, v = case(4, slots=7)
    start, slopes, windows = torch.tensor([3, 1]), [0.5, 0.25, 0.0], [1, 3, 99]
    mask = AttentionMask(start, torch.tensor(slopes), torch.tensor(windows), None, soft_cap)
    y = attention(q, k, v, mask, backend="reference")
    for row, t, head in _indices(q):
        i = int(start[row]) + t
        seen = [j for j in range(7) if 0 <= i - j < windows[head]]
        scores = [
            bounded(float(q[row, t, head] @ k[row, j, head]) / math.sqrt(4), soft_cap)
            - slopes[head] * (i - j)
            for j in seen
        ]
        weights = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
        torch.testing.assert_close(y[row, t, head], weights @ v[row, seen, head])


def bounded(score: float, soft_cap: float | None) -> float:
    return score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)


def _indices(q: Tensor) -> Iterator[tuple[int, int, int]]:
    batch, length, n_heads, _ = q.shape
    return ((r, t, h) for r in range(batch) for t in range(length) for h in range(n_heads))


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=15)
@given(length=LENGTHS, n_heads=st.sampled_from([1, 2, 3, 4, 6]), biases=BIASES)
def test_equals_the_definition(
    agrees: Callable[..., None],
    backend: str,
    length: int,
    n_heads: int,
    biases: dict[str, bool],
) -> None:
    inputs = case(length, n_heads=n_heads)
    agrees(run(backend), run("reference"), inputs, **scheme(n_heads, **biases))


@pytest.mark.parametrize("backend", FASTER)
@settings(max_examples=15)
@given(
    length=LENGTHS,
    starts=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    free=st.integers(0, 4),
    biases=BIASES,
)
def test_rows_that_start_anywhere_equal_the_definition(
    agrees: Callable[..., None],
    backend: str,
    length: int,
    starts: list[int],
    free: int,
    biases: dict[str, bool],
) -> None:
    inputs = case(length, slots=length + max(starts) + free)
    options = {"start": torch.tensor(starts), **scheme(3, **biases)}
    agrees(run(backend), run("reference"), inputs, **options)


@pytest.mark.parametrize("start", [None, torch.tensor([0, 11])])
@pytest.mark.parametrize("options", SCHEMES[1:])
def test_blocks_of_scores_make_up_the_whole(
    agrees: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Tensor],
    start: Tensor | None,
) -> None:
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", 1)  # the smallest
    inputs = case(40, slots=40 if start is None else 51)
    agrees(run("torch"), run("reference"), inputs, start=start, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", SCHEMES)
def test_two_chunks_are_the_whole(backend: str, options: dict[str, Tensor]) -> None:
    q, k, v = case(13)
    whole = run("reference")(q, k, v, **options)
    for cut in range(1, 13):
        head = run(backend)(q[:, :cut], k[:, :cut], v[:, :cut], **options)
        start = torch.full((2,), cut)
        tail = run(backend)(q[:, cut:], k, v, start, **options)
        chunked = torch.cat([head, tail], dim=1)
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", SCHEMES)
@pytest.mark.parametrize("start", [None, torch.tensor([2, 0])])
def test_slots_after_the_query_are_never_looked_at(
    backend: str, options: dict[str, Tensor], start: Tensor | None
) -> None:
    q, k, v = case(5, slots=9)
    y = run(backend)(q, k, v, start, **options)
    for t in range(5):
        after = t + 1 if start is None else int(start[0]) + t + 1
        k_after, v_after = k.clone(), v.clone()
        k_after[0, after:], v_after[0, after:] = 1e4, -1e4
        found = run(backend)(q, k_after, v_after, start, **options)
        torch.testing.assert_close(found[0, t], y[0, t], rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_precision(backend: str, half: torch.dtype) -> None:
    for options in SCHEMES:
        q, k, v = (t.to(half).requires_grad_() for t in case(5))
        y = run(backend)(q, k, v, **options)
        y.sum().backward()
        assert {t.grad.dtype for t in (q, k, v) if t.grad is not None} == {half} == {y.dtype}


@pytest.mark.parametrize("backend", FASTER)
@pytest.mark.parametrize("options", SCHEMES)
def test_half_precision_costs_no_more_than_twice_the_definitions_rounding(
    rounds_well: Callable[..., None], backend: str, options: dict[str, Tensor]
) -> None:
    factor = 2.0 if options else 4.0  # gradients of PyTorch's own kernel are not ours
    inputs = case(37)
    rounds_well(run(backend), run("reference"), inputs, halved=3, factor=factor, **options)


@pytest.mark.parametrize("backend", FASTER)
@pytest.mark.parametrize("options", SCHEMES[1:])
def test_a_bias_keeps_no_scores_for_the_backward_pass(
    backend: str, options: dict[str, Tensor]
) -> None:
    inputs = [t.requires_grad_() for t in case(40)]
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(backend)(*inputs, **options)
    given = {t.data_ptr() for t in (*inputs, *options.values())}
    own = sum(t.numel() for t in kept if t.data_ptr() not in given)
    output = inputs[0].numel()  # numba keeps it, and a number per head and query
    norms = inputs[0].shape[:3].numel()
    assert own <= (output + norms if backend == "numba" else 0)


@pytest.mark.parametrize("start", [None, torch.tensor([2, 7])])
@pytest.mark.parametrize("windows", [None, hard_alibi_windows(3, 2)])
@pytest.mark.parametrize("budget", [1, 1 << 18])
def test_slopes_have_gradients(
    agrees: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    start: Tensor | None,
    windows: Tensor | None,
    budget: int,
) -> None:
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", budget)
    inputs = [*case(20, slots=20 if start is None else 29), alibi_slopes(3).double()]

    def biased(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, slopes, start, windows: attention(
            q, k, v, AttentionMask(start, slopes, windows), backend=backend
        )

    agrees(biased("torch"), biased("reference"), inputs, start=start, windows=windows)


@pytest.mark.parametrize("first", [None, torch.tensor([[0] * 9 + [5] * 11, [3] * 20])])
def test_soft_caps_equal_the_definition(
    agrees: Callable[..., None], monkeypatch: pytest.MonkeyPatch, first: Tensor | None
) -> None:
    """Also with fewer heads of keys, and the gradient of a bias, which the cap does not change."""
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", 1)
    q, k, v = case(20, slots=29)
    start = torch.tensor([3, 7])

    def call(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, slopes, start, first: attention(
            q, k, v, AttentionMask(start, slopes, None, first, 0.7), backend=backend
        )

    inputs = [q, k[:, :, :1], v[:, :, :1], alibi_slopes(3).double()]
    agrees(call("torch"), call("reference"), inputs, start=start, first=first)


def test_soft_caps_of_many_queries_are_left_to_pytorch() -> None:
    q, k, v = case(20)
    capped = AttentionMask(soft_cap=0.7)
    assert torch.equal(attention(q, k, v, capped), attention(q, k, v, capped, backend="torch"))
    with pytest.raises(InputError, match="the numba kernel has no soft cap"):
        attention(q, k, v, capped, backend="numba")


@pytest.mark.parametrize("backend", ["numba", "torch", "reference"])
def test_few_queries_have_soft_caps(backend: str) -> None:
    q, k, v = case(3, slots=9)
    mask = AttentionMask(torch.tensor([6, 2]), soft_cap=0.7)
    y, wanted = (attention(q, k, v, mask, backend=name) for name in (backend, "reference"))
    torch.testing.assert_close(y, wanted)
    assert not torch.allclose(y, attention(q, k, v, AttentionMask(mask.start)), rtol=1e-3)


@pytest.mark.parametrize("budget", [1, 1 << 18])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_slots_before_the_first_are_not_seen(
    monkeypatch: pytest.MonkeyPatch, backend: str, budget: int
) -> None:
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", budget)
    leaves = [t.requires_grad_() for t in case(40)]
    first = torch.zeros(2, 40, dtype=torch.int64)
    first[0, 7:], first[0, 31:], first[1, 20:] = 7, 31, 20
    y = attention(*leaves, AttentionMask(first=first), backend=backend)
    pieces = [(0, 0, 7), (0, 7, 31), (0, 31, 40), (1, 0, 20), (1, 20, 40)]
    for row, a, b in pieces:
        part = [t[row : row + 1, a:b] for t in leaves]
        torch.testing.assert_close(y[row : row + 1, a:b], attention(*part, backend="reference"))
    found = torch.autograd.grad(y.sin().sum(), leaves)
    alone = [
        attention(*(t[r : r + 1, a:b] for t in leaves), backend="reference") for r, a, b in pieces
    ]
    wanted = torch.autograd.grad(sum(part.sin().sum() for part in alone), leaves)
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("unannotated")  # symbolic lengths are no integers
@pytest.mark.parametrize(
    ("options", "start", "first"),
    [
        (SCHEMES[1], None, None),
        (SCHEMES[2], torch.tensor([2, 0]), None),
        (SCHEMES[1], None, torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])),
        ({"soft_cap": 0.7}, None, None),
    ],
)
@pytest.mark.slow
def test_the_operators_keep_pytorchs_rules(
    options: dict[str, Any], start: Tensor | None, first: Tensor | None
) -> None:
    inputs = [t.float().requires_grad_() for t in case(5, slots=5 if start is None else 8)]
    biases = AttentionMask(start, first=first, **options)
    torch.library.opcheck(torch.ops.stateline.attention.default, (*inputs, *biases))
    plain = [t.detach() for t in inputs]
    backward = torch.ops.stateline.attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(plain[0]), *plain, *biases))


@pytest.mark.parametrize(
    ("heads", "slots", "mask", "wanted"),
    [
        (2, 5, AttentionMask(), "heads of keys must divide"),
        (3, 4, AttentionMask(), "a slot for each query"),
        (3, 5, AttentionMask(start=torch.tensor([0])), r"mask.start of shape \(batch\)"),
        (3, 5, AttentionMask(slopes=torch.zeros(4)), r"mask.slopes of shape \(head\)"),
        (3, 5, AttentionMask(windows=torch.ones(3)), "mask.windows of dtype int64"),
    ],
)
def test_wrong_calls_are_refused(heads: int, slots: int, mask: AttentionMask, wanted: str) -> None:
    q, k, v = case(5, slots=slots)
    with pytest.raises(InputError, match=wanted):
        attention(q, k[:, :, :heads], v[:, :, :heads], mask)


@pytest.mark.parametrize("length", [2, 40])
def test_starts_far_from_the_slots_read_nothing_from_elsewhere(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in case(length, slots=length + 3))
    far = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
    for windows in (None, torch.tensor([1, 7, UNLIMITED])):
        with torch.no_grad():
            alone = attention(q, k, v, AttentionMask(far, windows=windows), backend="numba")
        y = attention(q, k, v, AttentionMask(far, windows=windows), backend="numba")
        for x in torch.autograd.grad(y.sum(), (q, k, v)):
            assert not x[0].nan_to_num().any()
        assert not alone[0].nan_to_num().any()
        assert not y[0].nan_to_num().any()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("start", [None, torch.tensor([2, 7])])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("budget", [1, 1 << 18])
def test_grouped_queries_share_their_keys(
    agrees: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    groups: int,
    start: Tensor | None,
    biased: bool,
    budget: int,
) -> None:
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", budget)
    slots = 20 if start is None else 29
    q, k, v = case(20, slots=slots, n_heads=4)
    inputs = [q, k[:, :, :groups].clone(), v[:, :, :groups].clone()]
    options = {"start": start, **scheme(4, biased, biased)}

    def repeated(q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(4 // groups, dim=2) for t in (k, v))
        return run("reference")(q, k, v, **options)

    agrees(run("auto"), repeated, inputs, **options)
    agrees(run("torch"), repeated, inputs, **options)
    agrees(run("reference"), repeated, inputs, **options)


def cached(lengths: list[int], slots: int, kv_heads: int, dtype: torch.dtype) -> AttentionCache:
    k, v = (torch.randn(len(lengths), slots, kv_heads, 6, dtype=dtype) for _ in range(2))
    return AttentionCache(k, v, torch.tensor(lengths))


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dims", [0, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_in_place_equals_the_definition(
    backend: str, kv_heads: int, dims: int, dtype: torch.dtype
) -> None:
    """Rows of different lengths, one of them beyond where float32 holds angles; heads lie first."""
    heads = (4, kv_heads, kv_heads)
    q, k, v = (torch.randn(n, 2, 6, dtype=dtype).transpose(0, 1) for n in heads)
    frequency = frequencies(q, dims=dims, base=1e4) if dims else None
    for mask in (
        AttentionMask(),
        AttentionMask(None, alibi_slopes(4).to(dtype), hard_alibi_windows(4, 2)),
        AttentionMask(soft_cap=0.7),
    ):
        ours = cached([3, 5_000], 5_010, kv_heads, dtype)
        wanted = AttentionCache(*(x.clone() for x in ours))
        for _ in range(3):
            y = attention_step_(q, k, v, ours, mask, frequency, backend=backend)
            z = attention_step_(q, k, v, wanted, mask, frequency, backend="reference")
            torch.testing.assert_close(y, z)
        torch.testing.assert_close(ours, wanted)
        assert ours.length.tolist() == [6, 5_003]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_place_takes_a_cache_in_half_precision(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, heads, 6).to(dtype) for heads in (4, 2, 2))
    half = cached([2], 4, 2, torch.bfloat16)
    wide = AttentionCache(half.k.float(), half.v.float(), half.length.clone())
    y = attention_step_(q, k, v, half, backend=backend)
    wanted = attention_step_(q.float(), k.float(), v.float(), wide)
    torch.testing.assert_close(y.float(), wanted, rtol=2**-6, atol=2**-6)  # keys are rounded
    assert y.dtype == dtype
    assert half.k[:, 2].equal(k.bfloat16())


def test_numbers_in_half_precision_are_rounded_as_by_pytorch() -> None:
    pytest.importorskip("numba")
    odd = [float("nan"), float("inf"), -1e-40, 3.3961e38, 1.00390625, 1.01171875]
    v = torch.tensor(odd).view(1, 1, 6)
    cache = cached([0], 1, 1, torch.bfloat16)
    attention_step_(torch.ones(1, 1, 6), v, v, cache, backend="numba")
    torch.testing.assert_close(cache.v[:, 0], v.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_step_in_place_needs_a_free_slot() -> None:
    token = torch.randn(2, 1, 6)
    for length in (4, -1):
        with pytest.raises(InputError, match=r"no free slot left \(of 4\)"):
            attention_step_(token, token, token, cached([0, length], 4, 1, torch.float32))
    mask, cache = AttentionMask(torch.tensor([0, 0])), cached([0, 0], 4, 1, torch.float32)
    with pytest.raises(InputError, match="the length of the cache is the start"):
        attention_step_(token, token, token, cache, mask)
