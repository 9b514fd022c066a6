"""The schemes of initial weights, against what their official code does."""

import pytest
import torch

from stateline.models.config import Init, ModelConfig
from stateline.models.language_model import LanguageModel

D, VOCAB = 128, 400


def weights(init: Init, pattern: str = "h3 attention(bias=true)") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    settings = {"tie_embeddings": False, "init": init, "vocab_size": VOCAB, "d_model": D}
    return LanguageModel(ModelConfig(pattern, **settings)).state_dict()


def stds(init: Init) -> dict[str, float]:
    return {
        name.removeprefix("stack.layers."): float(weight.std())
        for name, weight in weights(init).items()
        if name.endswith("weight") and "norm" not in name
    }


UNIFORM = D**-0.5 / 3**0.5
"""Standard deviation of PyTorch's linear maps, U(-1/sqrt(d), 1/sqrt(d))."""

BRANCHES = 4**0.5


@pytest.mark.parametrize(
    ("init", "embedding", "qkv", "h3_out", "attention_out", "last"),
    [
        ("gpt2", 0.02, 0.02, 0.02 / BRANCHES, 0.02 / BRANCHES, 0.02 / BRANCHES),
        ("h3", 0.02, 0.02, 0.02, 0.02 / BRANCHES, 0.02 / BRANCHES),
        ("neox", 0.02, 0.02, 0.02, 0.02, 0.02),
        ("mamba", 0.02, UNIFORM, *(UNIFORM / BRANCHES,) * 2, UNIFORM / 2 / BRANCHES),
        ("staircase", 1.0, UNIFORM, *(UNIFORM / BRANCHES,) * 2, UNIFORM / 2 / BRANCHES),
        ("t5", 1.0, *(D**-0.5,) * 3, (4 * D) ** -0.5),
        ("lstm", 0.1 / 3**0.5, *(UNIFORM,) * 3, UNIFORM / 2),
    ],
)
def test_a_scheme_starts_at_its_deviations(
    init: Init, embedding: float, qkv: float, h3_out: float, attention_out: float, last: float
) -> None:
    found = stds(init)
    wanted = {
        "embedding.weight": embedding,
        "0.layer.qkv.weight": qkv,
        "2.layer.qkv.weight": qkv,
        "0.layer.out_proj.weight": h3_out,
        "2.layer.out_proj.weight": attention_out,
        "1.layer.out_proj.weight": last,
        "3.layer.out_proj.weight": last,
    }
    for name, deviation in wanted.items():
        assert found[name] == pytest.approx(deviation, rel=0.03), name


def test_embeddings_of_the_lstm_code_are_uniform() -> None:
    embedding = weights("lstm")["embedding.weight"]
    assert 0.099 < embedding.abs().max() <= 0.1


def test_biases_are_zero_but_in_the_staircase_code() -> None:
    for init in ("gpt2", "mamba", "staircase"):
        found = weights(init)  # type: ignore[arg-type]
        biases = [found[f"stack.layers.{n}.layer.out_proj.bias"] for n in (1, 3)]
        assert [bool(bias.any()) for bias in biases] == [init == "staircase"] * 2
    assert biases[0].abs().max() <= (4 * D) ** -0.5 / BRANCHES


@pytest.mark.parametrize(
    ("init", "first", "last"),
    [
        ("width", (2 / (5 * D)) ** 0.5, (2 / (5 * D)) ** 0.5 / 2**0.5),
        ("h3", 0.02, 0.02 / 2**0.5),
        ("neox", 0.02, 0.02),
        ("mamba", UNIFORM, (3 * 4 * D) ** -0.5 / 2**0.5),
        ("t5", D**-0.5, (4 * D) ** -0.5),
    ],
)
def test_experts_start_as_feed_forwards(init: Init, first: float, last: float) -> None:
    found = weights(init, f"feed_forward moe(d_hidden={4 * D})")
    assert float(found["stack.layers.1.layer.in_weight"].std()) == pytest.approx(first, rel=0.03)
    assert float(found["stack.layers.1.layer.out_weight"].std()) == pytest.approx(last, rel=0.03)
