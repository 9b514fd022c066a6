"""Attention by compiled kernels equals the definition, in outputs and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.ops import AttentionMask, attention
from stateline.ops.attention import PLAIN

HEADS, WIDTH = 3, 5
START = torch.tensor([0, 7])
MASKS: dict[str, dict[str, Tensor]] = {
    "causal": {},
    "slopes": {"slopes": torch.tensor([0.5, 0.0, 0.125], dtype=torch.float64)},
    "windows": {"windows": torch.tensor([1, 3, 1 << 62])},
}


def inputs(length: int, slots: int, width: int = WIDTH) -> list[Tensor]:
    sizes = (length, slots, slots)
    return [torch.randn(2, n, HEADS, width, dtype=torch.float64) for n in sizes]


def run(backend: str, leaves: list[Tensor], mask: AttentionMask) -> tuple[Tensor, Any]:
    q, k, v = own = [x.clone().requires_grad_() for x in leaves]
    y = attention(q, k, v, mask, backend=backend)
    weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y.detach(), torch.autograd.grad((y * weight).sum(), own)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("length", [1, 3, 16, 37, 150])
@pytest.mark.parametrize("began", [False, True])
def test_outputs_and_gradients_equal_the_definition(masks: str, length: int, began: bool) -> None:
    leaves = inputs(length, length + 9 if began else length)
    mask = AttentionMask(START if began else None, **MASKS[masks])
    found, wanted = run("numba", leaves, mask), run("reference", leaves, mask)
    assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("length", [3, 150])
def test_queries_see_their_document_alone(masks: str, length: int) -> None:
    leaves, positions = inputs(length, length + 9), START[:, None] + torch.arange(length)
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.1
    first = torch.where(starts, positions, 0).cummax(dim=1).values
    mask = AttentionMask(START, **MASKS[masks], first=first)
    found, wanted = run("numba", leaves, mask), run("reference", leaves, mask)
    assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        assert_close(attention(*leaves, mask, backend="numba"), wanted[0])


@pytest.mark.parametrize("width", [16, 40])
def test_wide_heads_equal_the_definition(width: int) -> None:
    leaves = inputs(70, 70, width)
    found, wanted = run("numba", leaves, PLAIN), run("reference", leaves, PLAIN)
    assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("masks", MASKS)
def test_few_queries_without_a_gradient_equal_the_definition(masks: str) -> None:
    leaves = inputs(2, 20)
    found, wanted = (
        attention(*leaves, AttentionMask(START, **MASKS[masks]), backend=backend)
        for backend in ("numba", "reference")
    )
    assert_close(found, wanted)


def test_changing_the_output_before_the_backward_pass_is_refused() -> None:
    leaves = [x.requires_grad_() for x in inputs(20, 20)]
    y = attention(*leaves, backend="numba")
    loss = (2 * y).sum()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
