"""Embeddings in the place of tokens give what the tokens give, in every way to read."""

import pytest
import torch
from torch.testing import assert_close

from stateline.errors import InputError
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig("h3 attention", 16, d_model=8, max_len=12, embedding_multiplier=2.0)
    return LanguageModel(config).eval()


def test_whole_in_chunks_in_steps_and_packed(model: LanguageModel) -> None:
    tokens = torch.randint(16, (2, 9))
    x, wanted = model.embedding(tokens), model(tokens)
    assert_close(model(x), wanted, rtol=0, atol=0)
    first, state = model.forward_chunk(x[:, :5], model.init_state(2))
    second, state = model.forward_chunk(x[:, 5:8], state)
    last, _ = model.step(x[:, 8], state)
    assert_close(torch.cat([first, second, last[:, None]], dim=1), wanted)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[:, 4] = True
    assert_close(model(x, starts=starts), model(tokens, starts=starts), rtol=0, atol=0)


def test_gradients_reach_a_prompt_that_is_learned(model: LanguageModel) -> None:
    prompt = torch.zeros(1, 3, 8, requires_grad=True)
    model(torch.cat([prompt, model.embedding(torch.tensor([[1, 2]]))], dim=1)).sum().backward()
    assert prompt.grad is not None
    assert (prompt.grad.abs().sum(dim=2) > 0).all()


def test_another_width_is_refused(model: LanguageModel) -> None:
    with pytest.raises(InputError, match=r"embeddings must be .* d_model=8\), got .*1, 2, 7"):
        model(torch.zeros(1, 2, 7))
