"""Chats: the model's own template, in chat completions and responses, by OpenAI's client."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stateline.data import Tokenizer, load_tokenizer
from stateline.generate import PrefixStates, TextStream, generate
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.serve import make_app
from tests.serve.running import Client, app_of, opinionated, running

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]
openai = pytest.importorskip("openai")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of_chats(folder: Path) -> Tokenizer:
    """Bytes and the special tokens of chats."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(
        vocab_size=256, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of_chats(tmp_path_factory.mktemp("chat"))


def special(tokenizer: Tokenizer, name: str) -> int:
    (number,) = tokenizer.encode(name).tolist()
    return number


def said(
    model: LanguageModel, tokenizer: Tokenizer, text: str | list[int], most: int = 100
) -> list[int]:
    """The tokens that follow a text, to the end of the turn."""
    end = special(tokenizer, "<|im_end|>")
    prompt = tokenizer.encode(text).tolist() if isinstance(text, str) else text
    tokens = generate(model, torch.tensor([prompt]), most)[0].tolist()
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LanguageModel:
    """A model that says some tokens and then ends its turn."""
    end = special(tokenizer, "<|im_end|>")
    for seed in range(200):
        torch.manual_seed(seed)
        config = ModelConfig("lstm", tokenizer.vocab_size, 16, tie_embeddings=False, head_bias=True)
        made = LanguageModel(config).eval()
        assert made.head is not None
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(3.0)
            made.head.bias[end] += 2.0
        answers = [said(made, tokenizer, asked(text)) for text in ("Hi", "And?", "Hé,\nyou")]
        if all(3 < len(tokens) < 100 for tokens in answers):
            return made
    raise AssertionError


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def client(model: LanguageModel, tokenizer: Tokenizer) -> Iterator[Client]:
    with running(make_app(PrefixStates(model, every=16), tokenizer, "tiny")) as client:
        yield client


@pytest.fixture
def chats(client: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=client.url, api_key="none", max_retries=0) as found:
        yield found


def shown(tokenizer: Tokenizer, tokens: list[int]) -> str:
    stream = TextStream(tokenizer, ends=[tokens[-1]])
    return "".join(map(stream.push, tokens))


HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Hé,", "you")]}]


def test_a_chat_ends_with_its_turn_and_shows_no_special_token(
    chats: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    tokens = said(model, tokenizer, asked("Hi"))
    found = chats.chat.completions.create(model="tiny", messages=HI, temperature=0)
    (choice,) = found.choices
    assert choice.message.content == shown(tokenizer, tokens)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert found.usage.completion_tokens == len(tokens)
    assert found.usage.prompt_tokens == len(tokenizer.encode(asked("Hi")))
    begin = str(special(tokenizer, "<|im_start|>"))
    for skipped, text in ((True, ""), (False, "<|im_start|>" * 3)):
        found = chats.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=3,
            logit_bias={begin: 100},
            extra_body={"skip_special_tokens": skipped},
        )
        assert found.choices[0].message.content == text


def test_a_streamed_chat_is_the_whole_one(chats: Any) -> None:
    given = {"model": "tiny", "messages": PARTS, "n": 2, "seed": 3, "max_tokens": 20}
    given |= {"logprobs": True, "top_logprobs": 2, "temperature": 0.5}
    whole = chats.chat.completions.create(**given)
    texts, told, last = ["", ""], [[], []], None
    options = {"include_usage": True}
    for chunk in chats.chat.completions.create(**given, stream=True, stream_options=options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            told[choice.index] += choice.logprobs.content if choice.logprobs else []
        last = chunk
    assert last is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert texts == [choice.message.content for choice in whole.choices]
    for found, choice in zip(told, whole.choices, strict=True):
        wanted = choice.logprobs.content
        assert [one.token for one in found] == [one.token for one in wanted]
        assert [one.logprob for one in found] == pytest.approx(
            [w.logprob for w in wanted], abs=1e-4
        )
        assert all(len(one.top_logprobs) == 2 for one in found)


def test_the_next_turn_of_a_chat_reads_only_itself(chats: Any) -> None:
    first = chats.chat.completions.create(
        model="tiny", messages=HI, temperature=0, logit_bias={"0": 100}, max_tokens=5
    )
    answer = first.choices[0].message.model_dump()
    more = [*HI, answer, {"role": "user", "content": "And?"}]
    second = chats.chat.completions.create(model="tiny", messages=more, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.total_tokens


def test_a_response_goes_on_with_the_tokens_of_the_whole_chat(
    chats: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    first = chats.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", temperature=0, max_output_tokens=100
    )
    text = "<|im_start|>system\nBe brief.<|im_end|>\n" + asked("Hi")
    for most in (100, 2):  # an answer that has ended its turn, and one that was cut
        first = chats.responses.create(
            model="tiny",
            input="Hi",
            instructions="Be brief.",
            temperature=0,
            max_output_tokens=most,
        )
        tokens = said(model, tokenizer, text, most)
        assert first.output_text == (
            shown(tokenizer, tokens) if most == 100 else tokenizer.decode(tokens)
        )
        second = chats.responses.create(
            model="tiny",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "And?"}]}],
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=100,
        )
        end = special(tokenizer, "<|im_end|>")
        whole = [*tokenizer.encode(text).tolist(), *(token for token in tokens if token != end)]
        whole += tokenizer.encode("<|im_end|>\n" + asked("And?")).tolist()
        assert second.usage.input_tokens == len(whole)
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        assert second.output_text == shown(tokenizer, said(model, tokenizer, whole))


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_an_answer_are_an_input(chats: Any, stream: bool) -> None:
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 5}
    one = chats.responses.create(input="Hi", **given)
    messages = [*HI, *[item.model_dump() for item in one.output], {"role": "user", "content": "a"}]
    found = chats.responses.create(input=messages, stream=stream, **given)
    if stream:
        *_, last = found
        found = last.response
    wanted = chats.chat.completions.create(
        model="tiny",
        messages=[*HI, {"role": "assistant", "content": one.output_text}, messages[-1]],
        temperature=0,
        max_completion_tokens=5,
    )
    assert found.output_text == wanted.choices[0].message.content


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, "role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "content"),
    ("chat/completions", {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    (
        "chat/completions",
        {"messages": HI, "chat_template_kwargs": {"m": 1, "prompt": 2}, "max_tokens": 1},
        "",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "type",
    ),
    ("chat/completions", {"messages": HI, "top_logprobs": 21}, "top_logprobs"),
    ("responses", {"input": [*HI, 1]}, "text, messages or tokens"),
    ("responses", {"input": "a", "n": 2}, "n"),
    (
        "responses",
        {"input": "a", "instructions": "b", "previous_response_id": f"resp_{'0' * 64}_{'0' * 16}"},
        "instructions begin",
    ),
]


@pytest.mark.parametrize(("path", "given", "message"), REFUSED)
def test_chats_that_are_not_served_are_refused_in_one_line(
    client: Client, path: str, given: dict[str, Any], message: str
) -> None:
    status, body = client.send(f"/v1/{path}", {"model": "tiny"} | given)
    if not message:
        assert status == 200
        return
    told = json.loads(body)["error"]["message"]
    assert (status, message in told, "\n" in told) == (400, True, False), told


def test_a_model_without_a_template_refuses_chats_and_takes_plain_text() -> None:
    with running(app_of(opinionated("lstm"))) as client:
        given = {"model": "tiny", "messages": HI}
        assert client.send("/v1/chat/completions", given)[0] == 400
        assert client.send("/v1/responses", {"model": "tiny", "input": HI})[0] == 400
        assert client.respond("Hi")["usage"]["input_tokens"] == 2


NAMES = """temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty
logit_bias stop stop_token_ids ignore_eos min_tokens skip_special_tokens seed n stream cache_salt
metadata user max_tokens max_completion_tokens max_output_tokens logprobs top_logprobs echo best_of
add_special_tokens stream_options store instructions previous_response_id chat_template_kwargs tools
tool_choice response_format text reasoning suffix background truncation prompt messages input model
include modalities prediction parallel_tool_calls service_tier nothing"""
FIELDS = NAMES.split()
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e300, -1e300, 2**31, 2**63, 10**30]
VALUES += ["", "a", "auto", "none", "\ud800", "\x00", [], [1], [-1], [10**9], ["a"], [[1], [2]]]
VALUES += [
    [[]],
    [None],
    [{}],
    {},
    {"a": 1},
    {"1": 1},
    {"1": 1e300},
    {"type": "text"},
    [*HI, *PARTS],
]
VALUES += [{"include_usage": True}, {"format": {"type": "text"}}, {"tools": [], "messages": 1}]
GOOD: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a", "max_tokens": 2},
    "chat/completions": {"messages": HI, "max_tokens": 2},
    "responses": {"input": "a", "max_output_tokens": 2},
}


def test_300_odd_requests_are_answered_or_refused_in_one_line(client: Client) -> None:
    draw, found = random.Random(0), Counter[int]()
    for _ in range(300):
        path = draw.choice([*GOOD])
        odd = {draw.choice(FIELDS): draw.choice(VALUES) for _ in range(draw.choice([1, 1, 2]))}
        given = {"model": "tiny"} | GOOD[path] | odd
        status, body = client.send(f"/v1/{path}", given)
        assert status in (200, 400, 404), (path, odd, body)
        if status != 200:
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error"
            assert "\n" not in error["message"]
        found[status] += 1
    assert found[200] > 10 < found[400], found
    assert client.complete("still there", max_tokens=1)
