"""Kernels of other projects get what they ask for.

Their packages need a GPU. Here stand-ins with their signatures, layouts and limits compute by our
definitions, so that a wrong layout, scale or order of arguments gives a wrong result.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.layers import Attention
from stateline.ops import (
    OPS,
    AttentionMask,
    DeltaSignals,
    GatedDeltaSignals,
    LinearSignals,
    LocalWindow,
    ScanSignals,
    attention,
    local_attention,
    third_party,
    use_backend,
)
from tests.ops.flat import delta_rule, gated_delta_rule, linear_attention, selective_scan

MODULES = {
    "fla.ops.simple_gla": "chunk_simple_gla",
    "fla.ops.gla": "chunk_gla",
    "fla.ops.generalized_delta_rule": "chunk_dplr_delta_rule",
    "fla.ops.gated_delta_rule": "chunk_gated_delta_rule",
    "mamba_ssm.ops.selective_scan_interface": "selective_scan_fn",
}


def one_by_one(
    run: Callable[..., Any], signals: Sequence[Any], states: Tensor, borders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sequences between the borders of one row, each from a state of its own."""
    if borders is None:
        return run(*signals, states, backend="reference")
    assert borders.dtype == torch.int64
    assert (len(signals[0]), len(states)) == (1, len(borders) - 1)
    parts = []
    for (a, b), state in zip(pairwise(borders.tolist()), states, strict=True):
        cut = (None if x is None else x[:, a:b] for x in signals)
        parts.append(run(*cut, state[None], backend="reference"))
    outputs, after = zip(*parts, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(after)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert initial_state is not None
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[2] == v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    signals = q * scale, k, v, g
    y, state = one_by_one(linear_attention, signals, initial_state, cu_seqlens)
    return y, state if output_final_state else None


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert g.shape == k.shape
    return chunk_simple_gla(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert initial_state is not None
    assert q.dtype == k.dtype == v.dtype == a.dtype == b.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    signals = q * scale, k, v, gk, a, b
    y, state = one_by_one(delta_rule, signals, initial_state, cu_seqlens)
    return y, state if output_final_state else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert initial_state is not None
    assert not use_qk_l2norm_in_kernel
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    signals = q * scale, k, v, g, beta
    y, state = one_by_one(gated_delta_rule, signals, initial_state, cu_seqlens)
    return y, state if output_final_state else None


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """Signals (batch, channel, length), B and C (batch, group, state, length); no state."""
    assert u.dtype == delta.dtype == B.dtype == C.dtype
    zeros = u.new_zeros(*u.shape[:2], A.shape[1])
    b, c = (t.permute(0, 3, 1, 2) for t in (B, C))
    return selective_scan(u.mT, delta.mT, A, b, c, zeros, backend="reference")[0].mT


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages seem installed, and the CPU seems to be their device."""
    monkeypatch.setattr(third_party, "DEVICE", "cpu")
    monkeypatch.setattr(third_party, "no_device", lambda: "")
    for path, name in MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts)))
        monkeypatch.setattr(sys.modules[path], name, globals()[name], raising=False)
    forget()
    yield
    forget()


THEIR = ("fla", "mamba", "flex")


def forget() -> None:
    endings = tuple(f"{name}_backend" for name in THEIR)
    ours = [m for m in sys.modules if m.startswith("stateline.ops.")]
    for module in [m for m in ours if m.endswith(endings)]:
        del sys.modules[module]
    for op in OPS.values():
        op.forget()
        for backend in (*THEIR, "mamba_ssm"):
            op._modules.pop(backend, None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HEADS, FEW_HEADS = [normal(1, 128, 1, 16)] * 3, [normal(1, 9, 1, 16)] * 3
NARROW, WIDE, SHORT = normal(1, 3, 1, 2), normal(1, 3, 1, 257), normal(1, 9, 2)
BIASED = LocalWindow(4, bias=normal(1, 4).requires_grad_())
KEYED = LocalWindow(4, position_keys=normal(4, 16))


def agree(function: Callable[..., Any], backend: str, *inputs: Tensor, limit: float) -> None:
    """Outputs and gradients are those of the definition, and outputs in inference mode."""
    with torch.inference_mode():
        leaves = [t.clone() for t in inputs]
        calls = (function(*leaves, backend=chosen) for chosen in (backend, "reference"))
        for y, right in zip(*(c if isinstance(c, tuple) else (c,) for c in calls), strict=True):
            assert (y.float() - right.float()).abs().max() <= limit * right.abs().max().clamp(min=1)

    def run(chosen: str) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        found = function(*leaves, backend=chosen)
        outputs = found if isinstance(found, tuple) else (found,)
        loss = sum((y.float() * normal(*y.shape, seed=n)).sum() for n, y in enumerate(outputs))
        assert isinstance(loss, Tensor)
        return [t.detach().float() for t in (*outputs, *torch.autograd.grad(loss, leaves))]

    for found, wanted in zip(run(backend), run("reference"), strict=True):
        assert (found - wanted).abs().max() <= limit * wanted.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("groups", [1, 4])
def test_linear_attention_by_fla(groups: int) -> None:
    q, k = (normal(2, 9, groups, 5, seed=n).bfloat16() for n in (1, 2))
    decay = -normal(2, 9, 4).exp()
    inputs = q, k, normal(2, 9, 4, 6).bfloat16(), decay, normal(2, 4, 5, 6)
    agree(linear_attention, "fla", *inputs, limit=1e-2)


def test_linear_attention_with_a_decay_per_entry_by_fla() -> None:
    q, k = (normal(2, 9, 2, 5, seed=n).bfloat16() for n in (1, 2))
    inputs = q, k, normal(2, 9, 4, 6).bfloat16(), -normal(2, 9, 4, 5).exp(), normal(2, 4, 5, 6)
    agree(linear_attention, "fla", *inputs, limit=1e-2)


STARTS = torch.tensor([[0, 0, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 1]]).bool()


def test_packed_rows_by_fla() -> None:
    """Documents are sequences of their own; the state continues the first one of a row."""
    q, k, v = (normal(2, 9, 4, 5, seed=n).bfloat16() for n in (1, 2, 3))
    k, state = torch.nn.functional.normalize(k, dim=-1), normal(2, 4, 5, 5)
    decay, beta = -normal(2, 9, 4, 5).exp(), normal(2, 9, 4).sigmoid()
    b = (-k * beta[..., None]).bfloat16()
    linear = partial(linear_attention, starts=STARTS)
    agree(linear, "fla", q, k, v, decay[..., 0], state, limit=1e-2)
    agree(linear, "fla", q, k, v, decay, state, limit=1e-2)
    gated = partial(gated_delta_rule, starts=STARTS)
    agree(gated, "fla", q, k, v, decay[..., 0], beta, state, limit=1e-2)
    agree(partial(delta_rule, starts=STARTS), "fla", q, k, v, decay, k, b, state, limit=1e-2)


def test_linear_attention_without_decay_by_fla() -> None:
    q, k, v = (normal(2, 9, 4, 5, seed=n).bfloat16() for n in (1, 2, 3))
    state = normal(2, 4, 5, 5)
    found = linear_attention(q, k, v, None, state, backend="fla")
    wanted = linear_attention(q, k, v, None, state, backend="reference")
    torch.testing.assert_close(found, wanted)


def test_gated_delta_rule_by_fla() -> None:
    q, k, v = (normal(2, 9, 4, 5, seed=n).bfloat16() for n in (1, 2, 3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, beta = -normal(2, 9, 4).exp(), normal(2, 9, 4).sigmoid()
    agree(gated_delta_rule, "fla", q, k, v, decay, beta, normal(2, 4, 5, 5), limit=1e-2)


def test_the_delta_rule_of_entries_by_fla() -> None:
    q, k, v, a = (normal(2, 9, 4, 5, seed=n).bfloat16() for n in (1, 2, 3, 4))
    a = torch.nn.functional.normalize(a, dim=-1)
    decay, b = -normal(2, 9, 4, 5).exp(), -a * normal(2, 9, 4, 1).sigmoid()
    agree(delta_rule, "fla", q, k, v, decay, a, b.bfloat16(), normal(2, 4, 5, 5), limit=1e-2)


@pytest.mark.parametrize("groups", [1, 2])
def test_selective_scan_by_mamba(groups: int) -> None:
    """The state goes in and out, with gradients, though their function has none."""
    u, dt = normal(2, 128, 4), normal(2, 128, 4, seed=1).sigmoid() / 4
    a, state = -normal(4, 3, seed=2).exp(), normal(2, 4, 3, seed=3)
    b, c = (normal(2, 128, groups, 3, seed=n) for n in (4, 5))
    agree(selective_scan, "mamba_ssm", u, dt, a, b, c, state, limit=5e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("biased", "windowed"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_attention_by_flex(monkeypatch: pytest.MonkeyPatch, biased: bool, windowed: bool) -> None:
    """Uncompiled; PyTorch has no backward pass of it on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    module, _ = OPS["attention"].module("flex")
    monkeypatch.setattr(module, "_compiled", lambda: flex_attention)
    module._masks.clear()
    q, k, v = (normal(1, 130, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
    slopes = torch.tensor([0.5, 0.25, 0.0, 1.0]) if biased else None
    windows = torch.tensor([1, 5, 129, 2**60]) if windowed else None
    mask = AttentionMask(None, slopes, windows, soft_cap=None if windowed else 0.7)
    found = attention(q, k, v, mask, backend="flex")
    wanted = attention(q, k, v, mask, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)
    assert len(module._masks) == 1


def test_masks_of_flex_in_inference_mode() -> None:
    """Tensors made there have no versions, so their masks are made anew."""
    module, _ = OPS["attention"].module("flex")
    module._masks.clear()
    zero, query, slot = (torch.tensor(n) for n in (0, 5, 4))
    with torch.inference_mode():
        seen = [
            module._mask(AttentionMask(first=first), normal(1, 128, 2, 16), 128)
            for first in (torch.zeros(1, 128, dtype=torch.int64), torch.arange(128)[None])
        ]
        assert [bool(mask.mask_mod(zero, zero, query, slot)) for mask in seen] == [True, False]
    assert not module._masks


def test_masks_that_evaluation_keeps_serve_training() -> None:
    """Tensors made in inference mode cannot be saved for a backward pass."""
    module, _ = OPS["attention"].module("flex")
    windowed, _ = OPS["local_attention"].module("flex")
    mask = AttentionMask(windows=torch.tensor([1, 5]))
    with torch.inference_mode():
        kept = [
            module._mask(mask, normal(1, 131, 2, 16), 131),
            windowed.window_mask(131, 131, 7, torch.device("cpu")),
        ]
    assert [mask.kv_indices.is_inference() for mask in kept] == [False, False]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("position", ["rope", "hard_alibi"])
def test_packed_rows_are_a_mask_of_flex(monkeypatch: pytest.MonkeyPatch, position: str) -> None:
    """Uncompiled, in the layer: equal to the documents as rows of their own."""
    from torch.nn.attention.flex_attention import flex_attention

    module, _ = OPS["attention"].module("flex")
    monkeypatch.setattr(module, "_compiled", lambda: flex_attention)
    module._masks.clear()
    torch.manual_seed(0)
    layer = Attention(64, n_heads=4, position=position).eval()
    x, starts = torch.randn(2, 150, 64), torch.rand(2, 150) < 0.05
    with torch.no_grad():
        wanted = layer(x, starts=starts)
        with use_backend(attention="flex"):
            found = layer(x, starts=starts)
        with use_backend(attention="torch"):
            assert not torch.allclose(layer(x), wanted, atol=1e-3)
    assert [mask.first is not None for mask, _ in module._masks.values()] == [True]
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("length", "slots", "window", "options"),
    [
        pytest.param(130, 150, 7, ("bias", "first"), marks=pytest.mark.slow),
        pytest.param(130, 130, 150, ("bias",), marks=pytest.mark.slow),
        pytest.param(257, 300, 1, (), marks=pytest.mark.slow),
        pytest.param(130, 140, 16, ("phase", "first", "bias"), marks=pytest.mark.slow),
        pytest.param(200, 264, 64, ("phase",), marks=pytest.mark.slow),
    ],
)
def test_local_attention_by_flex(
    monkeypatch: pytest.MonkeyPatch, length: int, slots: int, window: int, options: tuple[str, ...]
) -> None:
    """With ``first`` some queries see nothing; uncompiled, without gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    module, _ = OPS["attention"].module("flex")
    monkeypatch.setattr(module, "_compiled", lambda: flex_attention)
    q = normal(2, length, 4, 16)
    k, v = (normal(2, slots, 4, 16, seed=n) for n in (1, 2))
    given: dict[str, Any] = {}
    if "first" in options:
        given["first"] = torch.tensor([0, slots - 100])
    if "bias" in options:
        given["bias"] = normal(4, window, seed=3)
    if "phase" in options:
        given |= {"block_len": window // 2, "phase": torch.tensor([0, 3])}
    seen = LocalWindow(window, **given, soft_cap=0.7 if "bias" in options else None)
    found = local_attention(q, k, v, seen, backend="flex")
    wanted = local_attention(q, k, v, seen, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("length", "slots", "window"), [(130, 150, 7), (300, 300, 129), (128, 512, 300), (257, 257, 1)]
)
def test_the_mask_of_a_window_leaves_out_no_block(length: int, slots: int, window: int) -> None:
    """The blocks are those that PyTorch finds by looking at every score."""
    from torch.nn.attention.flex_attention import create_block_mask

    module, _ = OPS["local_attention"].module("flex")
    mask = module.window_mask(length, slots, window, torch.device("cpu"))
    wanted = create_block_mask(mask.mask_mod, None, None, length, slots, device="cpu")
    assert torch.equal(mask.to_dense(), wanted.to_dense())
    assert module.window_mask(length, slots, window, torch.device("cpu")) is mask


@pytest.mark.parametrize(
    ("op", "backend", "inputs", "reason"),
    [
        ("linear_attention", "fla", (LinearSignals(*[NARROW] * 3), None), "not exact enough"),
        ("linear_attention", "fla", (LinearSignals(*[WIDE] * 3), None), "up to 256"),
        ("delta_rule", "fla", (DeltaSignals(*[NARROW] * 6), None), "not exact enough"),
        ("gated_delta_rule", "fla", (GatedDeltaSignals(*[NARROW] * 5), None), "not exact enough"),
        ("selective_scan", "mamba_ssm", (ScanSignals(*[SHORT] * 4), SHORT, SHORT), "fewer than 1"),
        ("attention", "flex", (*FEW_HEADS, AttentionMask(slopes=normal(1)), 0.0), "at least 128"),
        ("attention", "flex", (*HEADS, AttentionMask(), 0.0), "plain"),
        ("local_attention", "flex", (*HEADS, BIASED, 0.0), "sums up the gradient"),
        ("local_attention", "flex", (*HEADS, KEYED, 0.0), "keys by distance"),
        ("local_attention", "flex", (*FEW_HEADS, LocalWindow(4), 0.0), "at least 128"),
    ],
)
def test_a_backend_says_why_it_cannot_run_a_call(
    op: str, backend: str, inputs: tuple[Any, ...], reason: str
) -> None:
    assert reason in OPS[op].reasons(op, *inputs)[backend]
