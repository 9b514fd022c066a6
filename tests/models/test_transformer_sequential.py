"""Weights of the official Staircase code: what fits, and what is said where something does not."""

import pytest
import torch
from torch import Tensor

from stateline.errors import InputError
from stateline.models.convert.table import load_pretrained
from stateline.models.convert.transformer_sequential import transformer_sequential_config

pytestmark = pytest.mark.cpu  # what is tested are files

SETTINGS = {
    "hid_sz": 8,
    "inner_hid_sz": 16,
    "nlayers": 2,
    "nheads": 2,
    "attn_lim": 6,
    "pre_norm": True,
    "vocab_sz": 11,
    "staircase_size": 6,
    "fix_staircase_size_forward": 2,
}


def official() -> dict[str, Tensor]:
    """The state dict of an official Transformer-XL, with other numbers."""
    shapes = {"in_emb.weight": (11, 8), "out.out_emb.weight": (11, 8), "out.out_emb.bias": (11,)}
    shapes |= {f"out_norm.{part}": (8,) for part in ("weight", "bias")}
    for layer in ("layers.0", "layers.1"):
        shapes[f"{layer}.attn.attn.key_pe"] = (1, 4, 6)
        shapes |= {f"{layer}.attn.proj_{p}.weight": (8, 8) for p in ("query", "key", "val", "out")}
        shapes |= {f"{layer}.{n}.{p}": (8,) for n in ("norm1", "norm2") for p in ("weight", "bias")}
        shapes |= {f"{layer}.ff.fc1.weight": (16, 8), f"{layer}.ff.fc1.bias": (16,)}
        shapes |= {f"{layer}.ff.fc2.weight": (8, 16), f"{layer}.ff.fc2.bias": (8,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_all_tensors_find_their_place() -> None:
    model = load_pretrained(official(), settings=SETTINGS)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 11)


@pytest.mark.parametrize(
    ("order", "pattern"),
    [
        ([0, 1, 0, 1], "ladder(sliding_attention*2, passes=2)"),
        ([0, 0, 0, 1, 1, 1], "ladder(sliding_attention, passes=3)*2"),
    ],
)
def test_the_order_of_a_ladder_is_read(order: list[int], pattern: str) -> None:
    settings = {**SETTINGS, "kind": "ladder", "order": order}
    assert transformer_sequential_config(settings).pattern == pattern


@pytest.mark.parametrize("order", [[0, 1, 1, 0], [0, 1, 0], []])
def test_another_order_is_refused(order: list[int]) -> None:
    with pytest.raises(InputError, match="ABAB or AABB"):
        transformer_sequential_config({**SETTINGS, "kind": "ladder", "order": order})


def test_missing_and_unknown_tensors_are_named() -> None:
    tensors = official()
    tensors["extra"] = tensors.pop("layers.1.norm1.bias")
    with pytest.raises(InputError, match=r"lack 'layers.1.norm1.bias'"):
        load_pretrained(tensors, settings=SETTINGS)
    with pytest.raises(InputError, match="hold 'extra'"):
        load_pretrained({**official(), "extra": tensors["extra"]}, settings=SETTINGS)


def test_a_setting_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="'nheads'"):
        transformer_sequential_config({"nlayers": 2})
