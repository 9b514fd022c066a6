"""The model with its tokenizer: text in, text out."""

from pathlib import Path

import pytest
import torch

import stateline
from stateline import LanguageModel, Model, ModelConfig, load
from stateline.data import ByteTokenizer
from stateline.errors import InputError
from stateline.generate import NumberTokenizer, Sampling, generate


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(LanguageModel(ModelConfig("attention h3", vocab_size=256, d_model=8)))


def test_the_text_is_that_of_the_tokens(model: Model) -> None:
    prompt = torch.tensor([list(b"once upon")])
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0)):
        tokens = generate(model.module, prompt, 20, sampling=sampling, seed=3)[0]
        expected = ByteTokenizer().decode(tokens.tolist())
        assert model.generate("once upon", 20, sampling=sampling, seed=3) == expected


def test_the_text_ends_before_a_stop_string(model: Model) -> None:
    whole = model.generate("once upon", 20)
    stop = whole[4:6]
    for given in ([stop], stop):
        assert model.generate("once upon", 20, stop=given) == whole[: whole.index(stop)]


def test_several_prompts_get_the_texts_that_each_gets_alone(model: Model) -> None:
    prompts, stop = ["once upon", "a"], model.generate("once upon", 20)[4:6]
    found = model.generate(prompts, 20, stop=stop)
    assert found == [model.generate(prompt, 20, stop=stop) for prompt in prompts]
    with pytest.raises(InputError, match="the prompt is empty"):
        model.generate(["a", ""], 20)
    with pytest.raises(InputError, match="the prompt is empty"):
        model.generate([], 20)


def test_a_text_begins_with_the_token_that_begins_texts(model: Model) -> None:
    class Begun(ByteTokenizer):
        beginning = (1,)

    begun = Model(model.module, Begun())
    assert begun.generate("once", 8) == model.generate("\x01once", 8)
    hidden, wanted = begun.hidden_states("once"), model.hidden_states("\x01once")
    assert all(map(torch.equal, hidden, wanted))


def test_a_saved_model_comes_back_with_its_tokenizer(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert isinstance(again.tokenizer, ByteTokenizer)
    assert again.generate("a", 8) == model.generate("a", 8)


def test_a_model_of_other_tokens_reads_numbers(tmp_path: Path) -> None:
    model = Model(LanguageModel(ModelConfig("lstm", vocab_size=10, d_model=8)))
    assert isinstance(model.tokenizer, NumberTokenizer)
    model.save(tmp_path)
    assert len(load(tmp_path).generate("3 1 4", 5).split()) == 5


def test_hidden_states_are_the_input_and_the_output_of_every_layer(model: Model) -> None:
    states = model.hidden_states("once upon")
    assert [tuple(state.shape) for state in states] == [(1, 9, 8)] * (
        1 + len(model.module.stack.links)
    )
    tokens = torch.tensor([list(b"once upon")])
    assert torch.equal(model.hidden_states(tokens)[-1], states[-1])
    with torch.no_grad():
        logits = model.module._logits(states[-1])
        assert torch.allclose(logits, model.module(tokens), atol=1e-6)


def test_a_prompt_that_is_too_long_is_named() -> None:
    model = Model(LanguageModel(ModelConfig("attention", 256, 8, max_len=4)))
    with pytest.raises(InputError, match="max_len=4"):
        model.generate("once upon", 1)
    with pytest.raises(InputError, match="4"):
        model.hidden_states("once upon")


def test_one_import_is_enough() -> None:
    assert {"Model", "load", "Comparison"} <= set(stateline.__all__)
