import dataclasses
from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stateline.errors import InputError
from stateline.layers import LAYERS
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.size import count_parameters, match_width, meta_model, training_bytes
from stateline.ops import use_backend


def test_a_model_has_the_parameters_of_the_formula() -> None:
    d, vocab = 24, 50
    block = (3 * d * d) + (d * d) + (4 * d * d + 4 * d) + (4 * d * d + d)  # qkv, out, up, down
    norms = 2 * 2 * d
    whole = vocab * d + 3 * (block + norms) + 2 * d
    assert count_parameters(ModelConfig("attention*3", vocab, d)) == whole


def test_an_untied_head_and_learned_positions_count() -> None:
    plain = ModelConfig("h3", vocab_size=50, d_model=16)
    more = dataclasses.replace(plain, tie_embeddings=False, max_len=30)
    assert count_parameters(more) - count_parameters(plain) == 50 * 16 + 30 * 16


def test_a_ladder_counts_its_core_once() -> None:
    once, often = (ModelConfig(f"ladder(h3, passes={n})", 50) for n in (1, 5))
    assert count_parameters(often) == count_parameters(once)


def test_counting_takes_no_memory() -> None:
    huge = ModelConfig("attention(n_heads=64)*12", vocab_size=50_000, d_model=8192)
    assert count_parameters(huge) > 9e9
    assert all(p.is_meta for p in meta_model(huge).parameters())


@pytest.mark.parametrize("pattern", ["attention", "h3 lstm", "ladder(s4d)"])
def test_the_matched_width_is_the_nearest_of_all(pattern: str) -> None:
    config, counted = ModelConfig(pattern, vocab_size=20), cache(count_parameters)

    def distance(width: int, wanted: int) -> int:
        return abs(counted(dataclasses.replace(config, d_model=width)) - wanted)

    for wanted in (1, 3000, 20_000, 54_321):
        matched = match_width(config, wanted, counted)
        nearest = min(distance(width, wanted) for width in range(4, 120, 4))
        assert distance(matched.d_model, wanted) == nearest
        assert dataclasses.replace(matched, d_model=config.d_model) == config


def test_the_matched_width_suits_the_heads() -> None:
    config = ModelConfig("attention(n_heads=20)", vocab_size=20)
    widths = {match_width(config, wanted).d_model for wanted in (1000, 30_000, 60_000)}
    assert widths == {20, 40, 60}


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [("h3", 3e7), ("h3 lstm", 1e12), ("attention(n_heads=20)", 1e10), ("lstm*3", 1e8)],
)
def test_a_large_width_is_found_by_few_tries(pattern: str, wanted: float) -> None:
    tried: list[int] = []

    def counted(config: ModelConfig) -> int:
        tried.append(config.d_model)
        return count_parameters(config)

    config = ModelConfig(pattern, vocab_size=20)
    found = match_width(config, wanted, counted)
    assert len(tried) < 200
    unit = 20 if "20" in pattern else 4
    near = [dataclasses.replace(config, d_model=found.d_model + n * unit) for n in (-1, 0, 1)]
    below, best, above = (abs(count_parameters(c) - wanted) for c in near)
    assert best <= min(below, above)


def test_of_widths_of_one_size_the_smallest_is_taken() -> None:
    config = ModelConfig("h3", vocab_size=20)
    assert match_width(config, 700, lambda c: c.d_model // 100).d_model == 70_000
    assert match_width(config, 1e30, lambda _: 5).d_model == 4


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (0, "must be positive, got 0"),
        (-1e6, "must be positive, got -1000000.0"),
        (float("nan"), "must be positive, got nan"),
        (
            float("inf"),
            r"must be at most [\d,]+, .* at d_model=\d+, got inf: choose a smaller size",
        ),
        (1e15, r"must be at most [\d,]+, .* got 1,000,000,000,000,000: choose a smaller size"),
    ],
)
def test_a_size_that_no_width_has_is_refused(wanted: float, message: str) -> None:
    with pytest.raises(InputError, match=f"the wanted size {message}"):
        match_width(ModelConfig("h3", vocab_size=20), wanted)


def test_a_model_that_suits_no_width_is_refused() -> None:
    with pytest.raises(InputError, match="masked_heads must be from 0 to n_heads"):
        match_width(
            ModelConfig("attention(position=hard_alibi(masked_heads=9))", vocab_size=20), 1000
        )


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_pytorch_counts(tied: bool) -> None:
    """Exactly: PyTorch counts all pairs in attention, we the (L + 1) / 2 per token that count."""
    d, length, layers = 16, 12, 2
    model = LanguageModel(ModelConfig(f"attention*{layers}", 30, d, tie_embeddings=tied))
    math, torch_ops = sdpa_kernel(SDPBackend.MATH), use_backend("torch")
    with math, torch_ops, FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    masked = layers * 4 * d * (length - (length + 1) / 2)
    assert counter.get_total_flops() / length == model.flops_per_token(length) + masked


def test_the_state_of_attention_grows_with_the_length_and_that_of_h3_does_not() -> None:
    per_token = 2 * 16 * 4  # a key and a value in float32
    attention, h3 = (meta_model(ModelConfig(p, 10, 16)).state_bytes for p in ("attention", "h3"))
    assert attention(1000) - attention(0) == 1000 * per_token
    assert h3(1000) == h3(0) > 0


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "pattern",
    [
        "attention(position=rope) h3 s4d lstm",
        "attention(dropout=0.1) mamba mamba2 rwkv7",
        "cached_staircase(attention, chunk_len=32) ladder(s5) moe slstm",
    ],
)
def test_activations_are_foretold(pattern: str, precision: str) -> None:
    config, kept = ModelConfig(pattern, 50, 32), dict[int, int]()
    model = LanguageModel(config)
    own, alive = {p.data_ptr() for p in model.parameters()}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(storage)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(4, 128, 32, requires_grad=True)
    lower = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with lower, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.stack(x)
    told = training_bytes(meta_model(config), 4, 128, precision=precision)  # type: ignore[arg-type]
    assert told["activations"] == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.parametrize(("loss_chunk", "of_row"), [(None, 6), (1, 1), (9, 2), (99, 6)])
def test_a_chunk_of_the_loss_has_a_position_of_each_row(loss_chunk: int, of_row: int) -> None:
    model = meta_model(ModelConfig("attention", 10, 8))
    told = training_bytes(model, 4, 6, loss_chunk=loss_chunk)["logits"]
    assert told == 2 * 4 * (4 * of_row) * 10


def test_a_layer_may_use_a_constant_that_is_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, constant = meta_model(ModelConfig("attention", 10, 8)), torch.ones(8)
    monkeypatch.setattr(LAYERS["attention"], "forward", lambda _, x: x * constant)
    assert training_bytes(model, 2, 4)["activations"] > 0


def test_a_layer_that_needs_values_is_named_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = meta_model(ModelConfig("attention", 10, 8))
    monkeypatch.setattr(LAYERS["attention"], "forward", lambda _, x: x * x.sum().item())
    with pytest.raises(InputError, match=r"a layer fails with them, as \.item\(\)"):
        training_bytes(model, 2, 4)
