"""What clients of OpenAI's and vLLM's protocol send: echoes, several answers, ends, penalties."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stateline.generate import Penalties, PrefixStates, generate
from stateline.serve import make_app
from stateline.serve.requests import CompletionRequest, decode
from tests.serve.running import Client, app_of, opinionated, running

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]

MODEL = opinionated()
PROMPT = b"once upon a time"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running(app_of(MODEL, origins=["https://page.example"])) as client:
        yield client


def continued(text: bytes, count: int) -> list[int]:
    return generate(MODEL, torch.tensor([list(text)]), count)[0].tolist()


def tokens_of(answer: dict[str, Any], choice: int = 0) -> list[int]:
    """The tokens of a choice with log-probabilities."""
    names = answer["choices"][choice]["logprobs"]["tokens"]
    return [int(name[1:-1]) if len(name) > 1 else ord(name) for name in names]


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("at_once", [5, 1024])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    client: Client, new: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateline.serve.reading.LOGITS_AT_ONCE", at_once * 256)
    (choice,) = client.complete(list(PROMPT), max_tokens=new, echo=True, logprobs=1)["choices"]
    text = PROMPT + bytes(continued(PROMPT, new))
    assert choice["text"].startswith(PROMPT.decode())
    with torch.no_grad():
        table = MODEL(torch.tensor([list(text)])).log_softmax(-1)[0]
    told = choice["logprobs"]
    first, *rest = told["token_logprobs"]
    assert (first, told["top_logprobs"][0]) == (None, None)
    wanted = [table[n, token].item() for n, token in enumerate(text[1:])]
    assert rest == pytest.approx(wanted, abs=1e-4)
    for n, (value, top) in enumerate(zip(rest, told["top_logprobs"][1:], strict=True)):
        greedy = int(table[n].argmax()) == text[n + 1]
        assert (value == max(top.values())) == greedy
    offsets = told["text_offset"][: len(PROMPT)]
    assert offsets == list(range(len(PROMPT)))


def test_an_echo_without_log_probabilities_is_the_prompt_and_its_text(client: Client) -> None:
    plain = client.complete(PROMPT.decode(), n=2)["choices"]
    for prompt in (PROMPT.decode(), list(PROMPT)):
        echoed = client.complete(prompt, echo=True, n=2)["choices"]
        assert [one["text"] for one in echoed] == [PROMPT.decode() + one["text"] for one in plain]
    nothing = client.complete(PROMPT.decode(), max_tokens=0)
    assert nothing["choices"][0]["text"] == ""
    assert nothing["usage"]["completion_tokens"] == 0


def test_several_prompts_and_answers_are_those_of_single_requests(client: Client) -> None:
    prompts, given = ["a b", "a longer one"], {"temperature": 1, "seed": 5, "logprobs": 0}
    together = client.complete(prompts, n=3, **given)
    assert [one["index"] for one in together["choices"]] == list(range(6))
    for place, prompt in enumerate(prompts):
        for number in range(3):
            alone = client.complete(prompt, **given | {"seed": 5 + number})["choices"][0]
            found = together["choices"][3 * place + number]
            assert (found["text"], found["logprobs"]["tokens"]) == (
                alone["text"],
                alone["logprobs"]["tokens"],
            )
    assert len({one["text"] for one in together["choices"][:3]}) == 3
    usage = together["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (15, 72)
    tokens = [list(prompt.encode()) for prompt in prompts]
    again = client.complete(tokens, n=3, **given)["choices"]
    assert [one["text"] for one in again] == [one["text"] for one in together["choices"]]


def test_several_streamed_answers_are_the_whole_ones(client: Client) -> None:
    given = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "seed": 1, "echo": True, "logprobs": 1}
    whole = json.loads(client.send("/v1/completions", given)[1])
    _, body = client.send("/v1/completions", given | {"stream": True})
    texts, told = [""] * 4, [[] for _ in range(4)]
    lines = [line for line in body.decode().split("\n") if line.startswith("data: {")]
    for line in lines:
        for choice in json.loads(line[6:])["choices"]:
            texts[choice["index"]] += choice["text"]
            told[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [one["text"] for one in whole["choices"]]
    for found, one in zip(told, whole["choices"], strict=True):
        wanted = one["logprobs"]["token_logprobs"]
        assert found[0] is wanted[0] is None
        assert found[1:] == pytest.approx(wanted[1:], abs=1e-4)


def test_a_text_ends_before_one_of_its_stop_tokens_but_not_too_early(client: Client) -> None:
    tokens = continued(PROMPT, 12)
    place = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    given = {"logprobs": 0, "stop_token_ids": [tokens[place]]}
    early = client.complete(list(PROMPT), **given)
    assert tokens_of(early) == tokens[: place + 1]
    assert early["choices"][0]["finish_reason"] == "stop"
    late = client.complete(list(PROMPT), **given, min_tokens=place + 1)
    assert tokens_of(late)[:place] == tokens[:place]
    assert tokens[place] not in tokens_of(late)[: place + 1]
    assert late["usage"]["completion_tokens"] > place + 1


def test_the_models_end_tokens_may_be_ignored() -> None:
    from tests.serve.test_serve import Ending

    tokens = continued(PROMPT, 12)
    place = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    with running(make_app(PrefixStates(MODEL), Ending(tokens[place]), "tiny")) as client:
        assert len(tokens_of(client.complete(list(PROMPT), logprobs=0))) == place + 1
        whole = client.complete(list(PROMPT), logprobs=0, ignore_eos=True)
    assert tokens_of(whole) == tokens


def test_penalties_and_biases_change_the_choice_as_they_say(client: Client) -> None:
    banned = continued(PROMPT, 1)[0]
    given = {"logprobs": 0, "max_tokens": 20}
    assert (
        tokens_of(client.complete(list(PROMPT), **given, logit_bias={str(banned): -100}))[0]
        != banned
    )
    forced = client.complete(list(PROMPT), **given, logit_bias={"65": 100})
    assert tokens_of(forced) == [65] * 20
    for name in ("presence_penalty", "frequency_penalty"):
        penalties = Penalties(**{name.split("_")[0]: 2.0})
        wanted, text = list[int](), list(PROMPT)
        for _ in range(20):
            with torch.no_grad():
                logits = MODEL(torch.tensor([text]))[0, -1]
            token = int(penalties(logits).argmax())
            penalties.counts[token] += 1
            wanted, text = [*wanted, token], [*text, token]
        assert tokens_of(client.complete(list(PROMPT), **given, **{name: 2.0})) == wanted
    assert wanted != continued(PROMPT, 20)


NEUTRAL: list[dict[str, Any]] = [
    {"tool_choice": "auto"},
    {"tools": []},
    {"background": False},
    {"suffix": ""},
    {"metadata": {"a": "b"}},
    {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y"},
    {"best_of": 1, "n": 1},
    {"response_format": {"type": "text"}},
    {"service_tier": "auto"},
    {"length_penalty": 1.0, "use_beam_search": False, "include_stop_str_in_output": False},
    {"echo": None, "logprobs": None, "stop": None, "nothing": None},
    {"stop": [], "logit_bias": {}, "stop_token_ids": [], "presence_penalty": 0.0},
    {"skip_special_tokens": False, "ignore_eos": True, "min_tokens": 0},
]


@pytest.mark.parametrize("given", NEUTRAL, ids=str)
def test_values_without_effect_are_taken_as_nothing(client: Client, given: dict[str, Any]) -> None:
    assert client.complete("neutral", **given)["choices"] == client.complete("neutral")["choices"]


def test_an_error_names_its_field(client: Client) -> None:
    _, body = client.send("/v1/completions", {"model": "tiny", "prompt": "a", "top_p": 2})
    assert json.loads(body)["error"]["param"] == "top_p"


def test_a_response_can_be_asked_for_and_deleted(client: Client) -> None:
    for stream in (False, True):
        given = {"model": "tiny", "input": f"kept {stream}", "max_output_tokens": 3}
        _, body = client.send("/v1/responses", given | {"stream": stream})
        events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        whole = json.loads(events[-1])["response"] if stream else json.loads(body)
        path = f"/v1/responses/{whole['id']}"
        assert json.loads(client.send(path)[1]) == whole
        assert client.respond(" on", previous_response_id=whole["id"])
        status, deleted = client.send(path, method="DELETE")
        assert (status, json.loads(deleted)["deleted"]) == (200, True)
        assert client.send(path)[0] == client.send(path, method="DELETE")[0] == 404
        again = {"model": "tiny", "input": "", "previous_response_id": whole["id"]}
        assert client.send("/v1/responses", again)[0] == 400
    unstored = client.respond("not kept", store=False)
    assert client.send(f"/v1/responses/{unstored['id']}")[0] == 404


def test_pages_of_named_sites_alone_may_read_answers(client: Client) -> None:
    import http.client

    for origin, allowed in (("https://page.example", True), ("https://other.example", False)):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/completions", headers=asked)
        answer = connection.getresponse()
        answer.read()
        assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == allowed
        connection.close()


def test_penalties_add_to_the_logits_and_leave_them_alone() -> None:
    logits = torch.zeros(5)
    penalties = Penalties(1.0, 0.5, {1: 3.0}, ends=[4], least=3)
    penalties.counts.update([0, 0])
    assert penalties(logits).tolist() == [-2.0, 3.0, 0.0, 0.0, -torch.inf]
    penalties.counts.update([1])
    assert penalties(logits.bfloat16()).tolist() == [-2.0, 1.5, 0.0, 0.0, 0.0]
    assert logits.tolist() == [0.0] * 5
    request = {"model": "tiny", "prompt": "a", "n": 2, "frequency_penalty": 1}
    from stateline.data import ByteTokenizer

    ((one, two),) = decode(json.dumps(request).encode(), CompletionRequest).rows(ByteTokenizer())
    assert one.penalties is not None
    assert one.penalties is not two.penalties
