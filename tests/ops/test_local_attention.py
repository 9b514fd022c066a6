import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateline.errors import InputError
from stateline.ops import LocalWindow, attention, local_attention
from stateline.ops.local_attention import pytorch
from tests.ops.test_attention import bounded

BACKENDS = ["torch", "reference"]
FASTER = ["torch"]


def case(length: int, slots: int, window: int) -> dict[str, Tensor]:
    """Queries, keys, values, a bias and keys by distance; two rows, three heads, float64."""
    random = torch.Generator().manual_seed(100 * length + slots)
    shapes = {
        "q": (2, length, 3, 4),
        "k": (2, slots, 3, 4),
        "v": (2, slots, 3, 4),
        "bias": (3, window),
        "position_keys": (window, 4),
    }
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=random)
        for name, shape in shapes.items()
    }


def run(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    return local_attention(q, k, v, LocalWindow(window, **options), backend=backend)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_the_definition_is_the_formula(soft_cap: float | None) -> None:
    x, first, window = case(4, 7, 3), [0, 5], 3
    given = {"first": torch.tensor(first), "soft_cap": soft_cap}
    y = run(**x, **given, window=window, backend="reference")
    for row in range(2):
        for t in range(4):
            i = 7 - 4 + t
            seen = [j for j in range(7) if 0 <= i - j < window and j >= first[row]]
            for h in range(3):
                scores = [
                    bounded(
                        float(x["q"][row, t, h] @ (x["k"][row, j, h] + x["position_keys"][i - j]))
                        / math.sqrt(4),
                        soft_cap,
                    )
                    + float(x["bias"][h, i - j])
                    for j in seen
                ]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
                wanted = sum(
                    (w * x["v"][row, j, h] for w, j in zip(weights, seen, strict=True)),
                    torch.zeros(4, dtype=torch.float64),
                )
                torch.testing.assert_close(y[row, t, h], wanted)


@pytest.mark.parametrize(("window", "before"), [(3, 0), (6, 1)])
def test_windows_of_blocks_begin_where_a_block_does(window: int, before: int) -> None:
    """With values that are unit vectors, what comes out is what has been seen."""
    x, block_len, phase = case(7, 12, window), 3, torch.tensor([0, 2])
    v = torch.eye(12, dtype=torch.float64)[None, :, None].expand(2, 12, 3, 12)
    y = run(
        q=x["q"].new_zeros(2, 7, 3, 12),
        k=torch.zeros_like(v),
        v=v,
        window=window,
        block_len=block_len,
        phase=phase,
        backend="reference",
    )
    for row in range(2):
        for t in range(7):
            begin = 5 + t - (int(phase[row]) + t) % block_len - before * block_len
            seen = y[row, t, 0].nonzero().flatten().tolist()
            assert seen == list(range(max(0, begin), 5 + t + 1))


@pytest.mark.parametrize("backend", [*FASTER, "numba"])
@settings(max_examples=40)
@given(
    length=st.sampled_from([1, 2, 5, 33, 70]),
    memory=st.integers(0, 9),
    window=st.sampled_from([1, 2, 7, 40, 90]),
    options=st.sets(st.sampled_from(["first", "bias", "position_keys", "blocks", "soft_cap"])),
)
def test_backends_equal_the_reference(
    backend: str, length: int, memory: int, window: int, options: set[str]
) -> None:
    x = case(length, length + memory, window)
    if backend == "numba":
        pytest.importorskip("numba")
        options = options & {"first", "position_keys"}
    for name in {"bias", "position_keys"} - options:
        del x[name]
    first = torch.tensor([0, length // 2]) if "first" in options else None
    blocks = {"block_len": (window + 1) // 2, "phase": torch.tensor([0, window // 2])}
    outcomes = []
    for which in (backend, "reference"):
        inputs = {name: t.clone().requires_grad_() for name, t in x.items()}
        y = run(
            **inputs,
            **(blocks if "blocks" in options else {}),
            first=first,
            soft_cap=0.7 if "soft_cap" in options else None,
            window=window,
            backend=which,
        )
        torch.manual_seed(0)
        weight = torch.randn(y.shape, dtype=y.dtype)
        outcomes.append([y, *torch.autograd.grad((y * weight).sum(), list(inputs.values()))])
    for found, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", FASTER)
def test_blocks_of_rows_and_queries_do_not_show(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = case(70, 80, 9)
    whole = run(**x, window=9, backend=backend)
    monkeypatch.setitem(pytorch.SCORES_PER_BLOCK, "cpu", 100)
    torch.testing.assert_close(run(**x, window=9, backend=backend), whole)


def test_a_window_over_everything_is_attention() -> None:
    x = case(9, 9, 9)
    q, k, v = x["q"], x["k"], x["v"]
    torch.testing.assert_close(local_attention(q, k, v, LocalWindow(9)), attention(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_not_seen_may_hold_anything(backend: str) -> None:
    x = case(4, 8, 3)
    first = torch.tensor([5, 7])
    wanted = run(**x, first=first, window=3, backend=backend)
    for name in ("k", "v"):
        x[name][0, :5] = x[name][1, :7] = 1e30
    found = run(**x, first=first, window=3, backend=backend)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_zero_and_passes_no_gradient(backend: str) -> None:
    x = {name: t.requires_grad_() for name, t in case(3, 3, 2).items()}
    y = run(**x, first=torch.tensor([3, 3]), window=2, backend=backend)
    assert not y.any()
    gradients = torch.autograd.grad(y.sum(), list(x.values()))
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_whose_bias_hides_all_gets_zero_and_passes_no_gradient(backend: str) -> None:
    x = case(40, 45, 3)
    x["bias"][1] = float("-inf")
    x = {name: t.requires_grad_() for name, t in x.items()}
    y = run(**x, window=3, backend=backend)
    assert not y[:, :, 1].any()
    assert y[:, :, [0, 2]].all()
    for g in torch.autograd.grad(y.sum(), [x["q"], x["k"], x["v"]]):
        assert not g[:, :, 1].any()
        assert g[:, -1, [0, 2]].all()


@pytest.mark.parametrize("backend", FASTER)
def test_slots_that_hold_nothing_cannot_overflow(backend: str) -> None:
    x = {name: t.float() for name, t in case(4, 8, 3).items()}
    first = torch.tensor([5, 7])
    wanted = run(**x, first=first, window=3, backend=backend)
    for name in ("k", "v"):
        x[name][0, :5] = x[name][1, :7] = torch.finfo(torch.float32).max
    x = {name: t.requires_grad_() for name, t in x.items()}
    found = run(**x, first=first, window=3, backend=backend)
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(found.sum(), list(x.values()))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", FASTER)
def test_a_window_costs_memory_in_proportion_to_the_length(backend: str) -> None:
    def scores(length: int) -> int:
        q = torch.empty(1, length, 1, 1)
        blocks = pytorch._blocks(q, q, 16)
        return sum((t.stop - t.start) * (s.stop - s.start) for _, t, s in blocks)

    assert backend == "torch"
    assert scores(4096) < 2.1 * scores(2048)


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (LocalWindow(0), "wants window.size to be int of at least 1, got 0"),
        (LocalWindow(3, block_len=4), "at most window.size = 3, got 4"),
        (LocalWindow(3, bias=torch.zeros(3, 4)), "window.size = 3 distances"),
        (LocalWindow(3, bias=torch.zeros(2, 3)), r"window.bias of shape \(head, window\)"),
        (LocalWindow(3, position_keys=torch.zeros(3, 5)), "with window = 3, d_head = 4"),
        (LocalWindow(3, first=torch.tensor([0])), r"window.first of shape \(batch\)"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window: LocalWindow, wanted: str) -> None:
    x = case(5, 7, 3)
    with pytest.raises(InputError, match=wanted):
        local_attention(x["q"], x["k"], x["v"], window)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_queries_share_their_keys(backend: str) -> None:
    x = case(9, 12, 4)
    x["k"], x["v"] = x["k"][:, :, :1], x["v"][:, :, :1]
    repeated = {**x, "k": x["k"].expand(2, 12, 3, 4), "v": x["v"].expand(2, 12, 3, 4)}
    y = run(**x, window=4, backend=backend)
    wanted = run(**repeated, window=4, backend="reference")
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("first", [None, [0, 12], [3, 11]])
def test_the_kernel_of_few_queries_equals_the_definition(
    length: int, soft_cap: float | None, first: list[int] | None
) -> None:
    pytest.importorskip("numba")
    x = case(length, 12, 4)
    given = {"q": x["q"], "k": x["k"][:, :, :1], "v": x["v"][:, :, :1], "window": 4}
    given |= {"soft_cap": soft_cap, "first": None if first is None else torch.tensor(first)}
    y, wanted = (run(**given, backend=backend) for backend in ("numba", "reference"))
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-13)
