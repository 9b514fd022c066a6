"""Dropout: where it acts, what it leaves, and that it is off in evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from stateline.errors import InputError
from stateline.layers import LSTM, Attention, BlockRecurrent, BlockState, FeedForward
from stateline.layers import SlidingAttention as Sliding
from stateline.layers.dropout import Dropout
from stateline.layers.state import fingerprint
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.models.sequence_head import ClassifierConfig, SequenceClassifier
from stateline.ops import AttentionMask, LocalWindow, attention, local_attention

PLACES: list[tuple[Any, dict[str, Any]]] = [
    (Attention, {"position": "rope"}),
    (Attention, {"position": "alibi"}),
    (Attention, {"position": "hard_alibi"}),
    (Sliding, {"window": 5, "position": "relative"}),
    (Sliding, {"window": 4, "position": "t5", "blocks": True}),
    (BlockState, {"window": 4}),
    (BlockState, {"window": 4, "variant": "mf", "n_states": 3}),
    (BlockRecurrent, {"window": 4, "n_states": 3}),
    (FeedForward, {}),
    (FeedForward, {"activation": "swiglu"}),
    (LSTM, {"n_layers": 2}),
]


@pytest.mark.parametrize(("layer", "options"), PLACES)
def test_every_place_drops_in_training_only(layer: Any, options: dict[str, Any]) -> None:
    made, x = layer(8, dropout=0.5, **options), torch.randn(2, 11, 8)
    plain = layer(8, **options)
    plain.load_state_dict(made.state_dict())
    assert made(x).equal(made(x)) is False
    state = made.init_state(2)
    assert made.forward_chunk(x, state)[0].equal(made.forward_chunk(x, state)[0]) is False
    made.eval()
    assert made(x).equal(plain(x))
    assert fingerprint(made) == fingerprint(plain)


def test_an_lstm_of_one_layer_drops_nothing() -> None:
    layer, x = LSTM(4, dropout=0.9), torch.randn(1, 3, 4)
    assert layer(x).equal(layer(x))


@pytest.mark.parametrize(
    "settings", [{"embedding_dropout": 0.5}, {"residual_dropout": 0.5}, {"block": "post_norm"}]
)
def test_models_drop_embeddings_and_branches(settings: dict[str, Any]) -> None:
    if "block" in settings:
        settings = {**settings, "residual_dropout": 0.5}
    tokens = torch.randint(9, (2, 7))
    for model in (
        LanguageModel(ModelConfig("h3", vocab_size=9, d_model=8, **settings)),
        SequenceClassifier(ClassifierConfig("h3", vocab_size=9, d_model=8, **settings)),
    ):
        assert model(tokens).equal(model(tokens)) is False
        assert model.eval()(tokens).equal(model(tokens))


def test_keywords_by_kind_reach_the_layers_of_a_wrapper() -> None:
    layers = {"sliding_attention": {"dropout": 0.2, "window": 4}, "feed_forward": {"dropout": 0.3}}
    config = ModelConfig("staircase(sliding_attention*2)", vocab_size=9, d_model=8, layers=layers)
    rates = sorted(m.p for m in LanguageModel(config).modules() if isinstance(m, Dropout) and m.p)
    assert rates == [0.2, 0.2, 0.3, 0.3]


def attended(backend: str, dropout: float, q: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(5)
    return attention(q, q, q.cos(), AttentionMask(**options), dropout, backend=backend)


@pytest.mark.parametrize("options", ["", "start", "slopes", "windows"])
def test_dropped_weights_are_those_of_the_definition(options: str) -> None:
    q = torch.randn(2, 6, 2, 4, dtype=torch.float64, requires_grad=True)
    given = {
        "": {},
        "start": {"start": torch.tensor([0, 0])},
        "slopes": {"slopes": torch.tensor([0.5, 0.1], dtype=torch.float64)},
        "windows": {"windows": torch.tensor([2, 6])},
    }[options]
    one, other = (attended(backend, 0.4, q, **given) for backend in ("torch", "reference"))
    assert_close(one, other)
    assert not torch.allclose(one, attended("torch", 0.0, q, **given))
    weight = torch.randn_like(one)
    pair = [torch.autograd.grad((y * weight).sum(), q)[0] for y in (one, other)]
    assert_close(*pair)
    with pytest.raises(InputError, match="no dropout"):
        attended("numba", 0.4, q, **given)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_mean_over_masks_is_the_output_without_dropout(backend: str) -> None:
    torch.manual_seed(0)
    q, options = torch.randn(4000, 3, 1, 2)[:1].expand(4000, -1, -1, -1), {"backend": backend}
    found = attention(q, q, q, dropout=0.5, **options).mean(dim=0)
    assert_close(found, attention(q, q, q, **options)[0], atol=0.1, rtol=0)
    p = torch.randn(3, 2)
    window = LocalWindow(3, position_keys=p)
    found = local_attention(q, q, q, window, 0.5, **options).mean(dim=0)
    assert_close(found, local_attention(q, q, q, window, **options)[0], atol=0.1, rtol=0)


def test_local_attention_has_the_gradient_of_its_dropped_weights() -> None:
    q, k, v = (torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    bias = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def run(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        q, k, v, bias, keys = inputs
        window = LocalWindow(4, torch.tensor([0, 2]), bias, keys)
        return local_attention(q, k, v, window, dropout=0.3)

    assert torch.autograd.gradcheck(run, (q, k, v, bias, keys))


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(InputError, match="from 0 to below 1"):
        Attention(8, dropout=rate)
    with pytest.raises(
        InputError, match="residual_dropout to be a finite number from 0 to below 1"
    ):
        ModelConfig("h3", vocab_size=9, residual_dropout=rate)
