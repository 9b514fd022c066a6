"""Prompts in a batch get the answers of each prompt alone, which end where they must."""

import pytest
import torch

from stateline.data import ByteTokenizer
from stateline.generate import answer, generate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel

PROMPTS = [[*b"A state"], [*b"It is"], [*b"A much longer prompt"]]
LIMITS = [9, 4, 12]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(1)
    config = ModelConfig("h3 attention(position=rope)", 256, 16, tie_embeddings=False)
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # so that it does not repeat one token
    return model


def alone(model: LanguageModel, number: int) -> list[int]:
    return generate(model, torch.tensor([PROMPTS[number]]), LIMITS[number])[0].tolist()


def test_an_answer_is_the_likeliest_text_up_to_its_limit(model: LanguageModel) -> None:
    found = answer(model, ByteTokenizer(), PROMPTS, LIMITS)
    assert found == [bytes(alone(model, n)).decode(errors="replace") for n in range(3)]
    assert "\ufffd" in "".join(found)  # bytes that are no text can be written to a file


def test_an_answer_of_no_tokens_is_empty(model: LanguageModel) -> None:
    wanted = answer(model, ByteTokenizer(), PROMPTS[1:], LIMITS[1:])
    assert answer(model, ByteTokenizer(), PROMPTS, [0, *LIMITS[1:]]) == ["", *wanted]


def test_an_answer_ends_before_a_stop_string_or_an_end_token(model: LanguageModel) -> None:
    tokens = alone(model, 2)
    before = bytes(tokens[:5]).decode(errors="replace")
    assert tokens[5] not in tokens[:5]
    (found,) = answer(model, ByteTokenizer(), PROMPTS[2:], LIMITS[2:], end=[tokens[5]])
    assert found == before
    stop = next(t for t in tokens if t < 128)
    texts = answer(model, ByteTokenizer(), PROMPTS, LIMITS, stop=[chr(stop)])
    assert texts[2] == bytes(tokens[: tokens.index(stop)]).decode(errors="replace")


def test_an_end_token_can_be_kept_from_being_the_first(model: LanguageModel) -> None:
    first, *_ = alone(model, 0)
    given = (model, ByteTokenizer(), PROMPTS[:1], [1])
    assert answer(*given, end=[first]) == [""]
    (text,) = answer(*given, end=[first], least=1)
    with torch.no_grad():
        best = model(torch.tensor(PROMPTS[:1]))[0, -1].topk(2).indices.tolist()
    assert best[0] == first
    assert text == bytes(best[1:]).decode(errors="replace")
