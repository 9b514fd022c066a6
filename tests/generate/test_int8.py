"""Weights that are rounded to integers of 8 bits, for decoding."""

from pathlib import Path

import pytest
import torch
from torch import nn

import stateline
from stateline.errors import InputError
from stateline.generate import PrefixStates
from stateline.layers import LAYERS, nbytes
from stateline.layers.int8 import Int8Linear
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.ops.int8_linear import GROUP, from_int8, int8_linear, to_int8

CAUSAL = [name for name, layer in LAYERS.items() if layer.causal]


def make(pattern: str, width: int = 64, **settings: bool) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(pattern, vocab_size=70, d_model=width, **settings)
    return LanguageModel(config).eval().requires_grad_(False)


def rounded_matrices(model: LanguageModel) -> None:
    """Give each large matrix the numbers that its integers stand for."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and min(module.weight.shape) >= GROUP:
            module.weight.copy_(from_int8(to_int8(module.weight)))


@pytest.mark.parametrize("shape", [(3, 64), (5, 100), (2, 7), (4, 0)])
def test_an_entry_is_off_by_at_most_half_a_scale(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    rounded = to_int8(weight)
    limit = 0.5001 * rounded.scales.repeat_interleave(GROUP, dim=1)[:, : shape[1]]
    assert ((from_int8(rounded) - weight).abs() <= limit).all()


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_and_many_inputs_are_mapped_alike(backend: str, rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 200).to(dtype), to_int8(torch.randn(999, 200))
    y = int8_linear(x, weight, torch.ones(999), backend=backend)
    right = int8_linear(x.double(), weight, torch.ones(999), backend="reference")
    sizes = x.double().abs() @ from_int8(weight).double().abs().T
    limit = 200 * torch.finfo(torch.float32).eps * sizes + torch.finfo(dtype).eps * right.abs()
    assert ((y.double() - right).abs() <= limit).all()


def test_wrong_weights_are_refused() -> None:
    good = to_int8(torch.ones(2, 100))
    for wrong, told in (
        (good._replace(codes=good.codes.to(torch.int16)), "weight.codes of dtype int8, got int16"),
        (good._replace(scales=good.scales[:, :1]), "100 codes needs 2 scales, got 1"),
    ):
        with pytest.raises(InputError, match=told):
            int8_linear(torch.ones(3, 100), wrong)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_layer_computes_with_the_rounded_matrices(name: str) -> None:
    """In whole sequences and in steps; where a map is in full, its matrix is not rounded."""
    model, same = make(name), make(name)
    model.to_int8_()
    in_full = {map for m in same.modules() for map in getattr(m, "in_full", ())}
    if not in_full:
        rounded_matrices(same)
    tokens = torch.randint(70, (2, 9))
    whole = model(tokens)
    head, state = model.forward_chunk(tokens[:, :5], model.init_state(2, capacity=9))
    decoder, parts = model.decoder(), [head]
    for t in range(5, 9):
        parts.append(decoder.step_(tokens[:, t], state)[:, None])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=1e-3)
    if in_full:
        assert all(not isinstance(model.get_submodule(n), Int8Linear) for n in _full(model))
    else:
        torch.testing.assert_close(whole, same(tokens), atol=2e-4, rtol=1e-3)


def _full(model: LanguageModel) -> list[str]:
    found = model.named_modules()
    return [f"{name}.{child}" for name, m in found for child in getattr(m, "in_full", ())]


@pytest.mark.parametrize("tied", [True, False])
def test_large_matrices_take_a_quarter(tied: bool) -> None:
    model = make("attention feed_forward", 256, tie_embeddings=tied)
    before = nbytes(tuple(model.parameters()))
    model.to_int8_()
    tensors = {x.data_ptr(): x for x in model.state_dict().values()}
    assert nbytes(tuple(tensors.values())) < 0.3 * before


@pytest.mark.usefixtures("unannotated")  # it gives what the types exclude
def test_a_model_is_read_with_rounded_weights(tmp_path: Path) -> None:
    model = make("attention")
    stateline.save_model(model, tmp_path)
    rounded = stateline.load(tmp_path, weights="int8").module
    rounded_matrices(model)
    tokens = torch.randint(70, (1, 6))
    torch.testing.assert_close(rounded(tokens), model(tokens), atol=1e-4, rtol=1e-3)
    assert PrefixStates(rounded).keys([1]) != PrefixStates(model).keys([1])
    with pytest.raises(InputError, match="save the model that was read"):
        stateline.save_model(rounded, tmp_path)
    with pytest.raises(InputError, match="int4"):
        stateline.load(tmp_path, weights="int4")  # type: ignore[arg-type]
