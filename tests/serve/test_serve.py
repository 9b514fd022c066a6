"""The server: answers, streams, kept conversations, limits, and what it refuses."""

import asyncio
import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stateline.data import ByteTokenizer, CharacterTokenizer, Decoder
from stateline.errors import InputError
from stateline.generate import (
    Model,
    PrefixStates,
    Sampling,
    Session,
    SessionState,
    extend,
    generate,
    prefill,
    seeded,
)
from stateline.layers import nbytes
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.serve import Limits, Row, make_app
from stateline.serve.app import Stream, Ticket, _encoded
from stateline.serve.engine import Engine
from stateline.serve.metrics import Metrics
from stateline.serve.replies import CompletionAnswer, CompletionLogProbs, ResponseAnswer
from stateline.serve.requests import CompletionRequest, ResponseRequest, decode
from stateline.serve.rows import BusyError, LogProbs, Piece, StoppedError
from tests.serve.running import Client, app_of, opinionated, running

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]

MODEL = opinionated()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with running(app_of(MODEL, limits=Limits(new_tokens=4000, body=20_000))) as client:
        yield client


def continued(text: bytes, count: int) -> list[int]:
    return generate(MODEL, torch.tensor([list(text)]), count)[0].tolist()


def shown(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="surrogateescape").encode(errors="replace").decode()


def plain(text: str) -> str:
    return text.replace("\ufffd", "?")


def test_a_completion_is_what_generate_gives(client: Client) -> None:
    answer = client.complete("once upon a time")
    (choice,) = answer["choices"]
    assert plain(choice["text"]) == shown(continued(b"once upon a time", 12))
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 16
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == 28
    for same in (list(b"once upon a time"), ["once upon a time"], [list(b"once upon a time")]):
        assert client.complete(same)["choices"] == answer["choices"]


def test_a_repeated_prompt_is_not_read_again(client: Client) -> None:
    first, second = (client.complete("a prompt of its own, once", logprobs=3) for _ in range(2))
    assert first["choices"] == second["choices"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached == [0, 25]
    longer = client.complete("a prompt of its own, twice")
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == 17
    salted = client.complete("a prompt of its own, once", cache_salt="s", logprobs=3)
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"] == first["choices"]


def test_sampled_tokens_follow_from_the_seed(client: Client) -> None:
    prompt, sampling = torch.tensor([list(b"sampled")]), Sampling(0.9, top_p=0.9)
    wanted = generate(MODEL, prompt, 20, sampling=sampling, seed=7)[0].tolist()
    given = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 20}
    assert plain(client.complete("sampled", **given)["choices"][0]["text"]) == shown(wanted)


def test_rows_together_give_what_they_give_alone(client: Client) -> None:
    prompts = [f"{number} bottles of beer"[: 3 + number] for number in range(24)]
    settings = [{"temperature": n % 3 / 2, "seed": n, "max_tokens": 5 + n} for n in range(24)]
    alone = [client.complete(p, **s)["choices"] for p, s in zip(prompts, settings, strict=True)]
    with ThreadPoolExecutor(24) as pool:
        asked = [
            pool.submit(client.complete, p, **s) for p, s in zip(prompts, settings, strict=True)
        ]
        assert [one.result()["choices"] for one in asked] == alone


def test_a_text_ends_before_a_stop_string(client: Client) -> None:
    text = Model(MODEL, ByteTokenizer()).generate("stop here", 40)
    wanted = next(text[n : n + 1] for n in range(3, 40) if text[n : n + 1].isascii())
    answer = client.complete("stop here", max_tokens=40, stop=[wanted, "\u0000\u0001x"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert plain(answer["choices"][0]["text"]) == plain(
        text[: text.index(wanted)].encode(errors="replace").decode()
    )


class Ending(ByteTokenizer):
    """Has a token that ends a text."""

    def __init__(self, end: int) -> None:
        self._end = end

    @property
    def end_of_text(self) -> int:
        return self._end


class Begun(ByteTokenizer):
    """Puts a token before a text."""

    beginning = (1,)


def test_a_prompt_and_the_first_turn_alone_begin_a_text(client: Client) -> None:
    with running(make_app(PrefixStates(MODEL), Begun(), "tiny")) as begun:
        found, wanted = begun.complete("the end"), client.complete([1, *b"the end"])
        first, same = begun.respond("the end"), client.respond([1, *b"the end"])
        turns = [
            where.respond(" and more", previous_response_id=answer["id"])
            for where, answer in ((begun, first), (client, same))
        ]
    assert found["choices"] == wanted["choices"]
    assert found["usage"]["prompt_tokens"] == 8
    assert first["output"][0]["content"] == same["output"][0]["content"]
    assert turns[0]["output"][0]["content"] == turns[1]["output"][0]["content"]
    assert turns[0]["usage"] == turns[1]["usage"]


def test_a_text_ends_before_the_token_that_ends_it() -> None:
    tokens = continued(b"the end", 12)
    place = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    app = make_app(PrefixStates(MODEL), Ending(tokens[place]), "tiny")
    with running(app) as client:
        answer, told = client.complete("the end"), client.respond("the end")
    (choice,) = answer["choices"]
    assert (plain(choice["text"]), choice["finish_reason"]) == (shown(tokens[:place]), "stop")
    assert answer["usage"]["completion_tokens"] == place + 1
    assert (told["status"], told["incomplete_details"]) == ("completed", None)
    assert told["output"][0]["content"][0]["text"] == choice["text"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_model(dtype: torch.dtype) -> None:
    model = opinionated().to(dtype)
    with running(app_of(model)) as client:
        one, none = (client.complete("how likely", logprobs=n)["choices"][0] for n in (5, 0))
    session = Session(model, prefill(model, torch.tensor([list(b"how likely")])))
    wanted = torch.cat([session.step().log_probs for _ in range(12)])
    for choice, n in ((one, 5), (none, 0)):
        found = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert all(len(top) <= n + 1 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(("asked", "most"), [(0, 1), (2, 3)])
def test_the_likeliest_tokens_are_told_with_the_chosen_one(
    client: Client, asked: int, most: int
) -> None:
    given = {"logprobs": asked, "temperature": 5, "max_tokens": 50}
    told = client.complete("all told", **given)["choices"][0]["logprobs"]
    rows = list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))
    assert all(top[token] == log_prob for token, log_prob, top in rows)
    assert max(len(top) for *_, top in rows) == most


def test_more_log_probabilities_than_tokens_are_those_of_all_tokens() -> None:
    model = LanguageModel(ModelConfig("lstm", 3, 8)).eval()
    with running(make_app(PrefixStates(model), CharacterTokenizer("abc"), "tiny")) as client:
        told = client.complete("ab", logprobs=20)["choices"][0]["logprobs"]
    assert [sorted(top) for top in told["top_logprobs"]] == [["a", "b", "c"]] * 12


def test_text_offsets_are_places_in_the_text(client: Client) -> None:
    choice = client.complete("offsets", logprobs=1, temperature=1, max_tokens=400)["choices"][0]
    told, text = choice["logprobs"], choice["text"]
    pairs = list(zip(told["tokens"], told["text_offset"], strict=True))
    named = [(name, place) for name, place in pairs if not re.fullmatch(r"<\d+>", name)]
    assert 0 < len(named) < len(pairs) == 400
    assert all(text[place : place + len(name)] == name for name, place in named)
    told = CompletionLogProbs(ByteTokenizer(), Row([1]))
    for token in (*"aé".encode(), 226, 130, *"b€c".encode()):
        told.add([Piece(log_probs=(LogProbs(token, 0.0, ()),))])
    offsets = told.all["text_offset"]
    assert offsets == [0, 1, 1, 2, 2, 4, 5, 5, 5, 6]


def test_the_names_of_tokens_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = ByteTokenizer(), list[int]()
    name = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: (decoded.extend(ids), name(ids))[1])
    told = CompletionLogProbs(tokenizer, Row([1]))
    top = ((98, -1.0), (10, -2.0), (0, -3.0))
    told.add([Piece(log_probs=(LogProbs(97, 0.0, top),))])
    named = {"a": 0.0, "b": -1.0, "\n": -2.0, "<0>": -3.0}
    assert told.all["top_logprobs"] == [named]
    assert decoded.count(98) == 1


class Alike(ByteTokenizer):
    """Several tokens have the same text, and bytes above 127 are shown as U+FFFD."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ord("a") if one in b"abc" else one for one in ids).decode(errors="replace")


def test_tokens_of_the_same_text_are_told_apart() -> None:
    answer = CompletionLogProbs(Alike(), Row([1]))
    top = ((97, -1.0), (98, -2.0), (99, -3.0), (200, -4.0), (201, -5.0))
    answer.add([Piece(log_probs=(LogProbs(98, -2.0, top), LogProbs(200, -4.0, top)))])
    told = answer.all
    assert told["tokens"] == ["a", "<200>"]
    assert told["top_logprobs"] == [
        {"a": -2.0, "<97>": -1.0, "<99>": -3.0, "<200>": -4.0, "<201>": -5.0},
        {"<200>": -4.0, "a": -1.0, "<98>": -2.0, "<99>": -3.0, "<201>": -5.0},
    ]


def events(body: bytes) -> list[dict[str, Any]]:
    lines = [line for line in body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_bytes_that_are_not_utf8_are_shown_in_json_as_one_character() -> None:
    assert json.loads(_encoded({"previous_response_id": "\udcff"})) == {
        "previous_response_id": "\ufffd"
    }


def test_a_stream_is_the_whole_answer(client: Client) -> None:
    whole = client.complete("streamed", logprobs=2)
    request = {"model": "tiny", "prompt": "streamed", "temperature": 0, "max_tokens": 12}
    request |= {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}
    status, body = client.send("/v1/completions", request)
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"event:" not in body
    *chunks, last = events(body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    *reasons, reason = [choice["finish_reason"] for choice in choices]
    assert (set(reasons) - {None}, reason) == (set(), "length")  # there may be one piece alone
    for name in ("tokens", "token_logprobs", "text_offset"):
        found = [value for choice in choices for value in choice["logprobs"][name]]
        assert found == whole["choices"][0]["logprobs"][name]
    assert last["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks)
    request |= {"stream_options": {"include_usage": False}}
    found = events(client.send("/v1/completions", request)[1])
    assert not any("usage" in chunk for chunk in found)


def test_a_conversation_continues_its_state_and_forks(client: Client) -> None:
    first = client.respond("first turn. ")
    said = first["output"][0]["content"][0]["text"]
    assert plain(said) == shown(continued(b"first turn. ", 12))
    text = b"first turn. " + bytes(continued(b"first turn. ", 12))
    for turn in (b"second", b"another"):
        told = client.respond(turn.decode(), previous_response_id=first["id"])
        wanted = shown(continued(text + turn, 12))
        assert plain(told["output"][0]["content"][0]["text"]) == wanted
        assert told["usage"]["input_tokens_details"] == {"cached_tokens": len(text)}
        assert told["usage"]["input_tokens"] == len(text + turn)
    again = client.respond("", previous_response_id=first["id"])
    assert plain(again["output"][0]["content"][0]["text"]) == shown(continued(text, 12))


def test_a_response_says_what_was_asked_for_and_why_it_ended(client: Client) -> None:
    status, body = client.send("/v1/responses", {"model": "tiny", "input": "plain"})
    plain = json.loads(body)
    assert (status, plain["usage"]["output_tokens"], plain["store"]) == (200, 256, True)
    assert (plain["temperature"], plain["top_p"], plain["metadata"]) == (1, 1, {})
    given = {"temperature": 0.5, "top_p": 0.5, "max_output_tokens": 12, "store": False}
    given |= {"metadata": {"a": "b"}, "previous_response_id": plain["id"]}
    told = client.respond("again", **given)
    assert {name: told[name] for name in given} == given
    assert (told["status"], told["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    usage = told["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == 278


def test_the_next_turn_follows_the_stop_string_that_ended_the_answer(client: Client) -> None:
    tokens = continued(b"a turn that stops", 12)
    place = next(n for n in range(3, 12) if tokens[n] < 128 and tokens[n] not in tokens[:n])
    first = client.respond("a turn that stops", stop=chr(tokens[place]))
    assert plain(first["output"][0]["content"][0]["text"]) == shown(tokens[:place])
    told = client.respond("go on", previous_response_id=first["id"])
    text = b"a turn that stops" + bytes(tokens[: place + 1]) + b"go on"
    assert plain(told["output"][0]["content"][0]["text"]) == shown(continued(text, 12))
    assert told["usage"]["input_tokens"] == len(text)


@pytest.mark.slow
def test_after_50000_tokens_the_next_turn_reads_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, read = opinionated("h3"), list[int]()

    def counted(model: Any, state: SessionState, tokens: torch.Tensor) -> SessionState:
        read.append(tokens.shape[1])
        return extend(model, state, tokens)

    monkeypatch.setattr("stateline.generate.prefixes.extend", counted)
    kept = PrefixStates(model)
    with running(app_of(model, prefixes=kept)) as client:
        first = client.respond("a long conversation " * 2500)
        assert sum(read) == first["usage"]["input_tokens"] - 1 == 49_999  # and the first token
        read.clear()
        client.respond(" go on", previous_response_id=first["id"])
        assert sum(read) == 6
    assert len({nbytes(state.model) for state in kept._states.values()}) == 1  # it has not grown


def test_a_streamed_response_is_the_whole_one(client: Client) -> None:
    whole = client.respond("stream me")
    request = {"model": "tiny", "input": "stream me", "temperature": 0, "max_output_tokens": 12}
    found = events(client.send("/v1/responses", request | {"stream": True})[1])
    kinds = [event["type"] for event in found]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert (found[0]["response"]["output"], found[0]["response"]["usage"]) == ([], None)
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    assert found[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    (name,) = {event["response"]["id"] for event in (found[0], found[-1])}
    again = [client.respond("and", previous_response_id=old) for old in (name, whole["id"])]
    assert again[0]["output"][0]["content"] == again[1]["output"][0]["content"]
    cached = [one["usage"]["input_tokens_details"]["cached_tokens"] for one in again]
    assert cached == [len("stream me") + 12] * 2


def test_a_piece_without_text_is_no_event_of_a_response() -> None:
    answer = ResponseAnswer("tiny", ResponseRequest(model="tiny", input="a"))
    assert answer.add([(0, Piece())]) == []
    ((name, event),) = answer.add([(0, Piece("b"))])
    assert (name, event["delta"]) == ("response.output_text.delta", "b")


def test_models_and_metrics_are_shown(client: Client) -> None:
    names = ("prompt_tokens_total", "reused_tokens_total", "new_tokens_total")
    before = list(map(client.metric, names))
    for _ in range(2):
        client.complete("count me", max_tokens=2)
    found = [client.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert found == [16, 8, 4]
    assert [m["id"] for m in json.loads(client.send("/v1/models")[1])["data"]] == ["tiny"]
    assert json.loads(client.send("/v1/models/tiny")[1])["object"] == "model"
    assert client.metric("rows") == 0


def error_of(body: bytes) -> str:
    found = json.loads(body)["error"]
    assert found["type"] in ("invalid_request_error", "server_error")
    assert "\n" not in found["message"]
    return found["message"]


GOOD: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [1, 999]}, "999"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": ["a", 1]}, "a list of prompts must have texts or lists of tokens"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [[[1]]]}, r"\$\.prompt"),
        ({"max_tokens": -1}, r"\$\.max_tokens"),
        ({"max_tokens": 4001}, "at most 4000 new tokens"),
        ({"temperature": -1}, r"\$\.temperature"),
        ({"top_p": 0}, r"\$\.top_p"),
        ({"top_k": -2}, r"\$\.top_k"),
        ({"min_p": 2}, r"\$\.min_p"),
        ({"repetition_penalty": 0}, "wants repetition_penalty to be"),
        ({"stop": ""}, r"\$\.stop"),
        ({"n": 0}, r"`int` >= 1 - at `\$\.n`"),
        ({"n": 65}, "65 states of 7 tokens"),
        ({"best_of": 2}, "best_of must be n, 1, got 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias must have numbers of tokens as names, got 'a'"),
        ({"logit_bias": {"256": 1}}, "tokens must be from 0 to 255"),
        ({"logit_bias": {"3": 101}}, r"\$\.logit_bias"),
        ({"presence_penalty": 101}, r"\$\.presence_penalty"),
        ({"frequency_penalty": "a"}, r"\$\.frequency_penalty"),
        ({"stop_token_ids": [-1]}, r"\$\.stop_token_ids"),
        ({"stop_token_ids": [256], "min_tokens": 1}, "tokens must be from 0 to 255"),
        ({"min_tokens": 1.5}, r"\$\.min_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"metadata": {"a": 1}}, r"\$\.metadata"),
        ({"nonsense": 1}, "nonsense"),
        ({"seed": -1}, r"\$\.seed"),
        ({"logprobs": 21}, r"\$\.logprobs"),
        ({"model": "huge"}, "there is no model 'huge'"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    client: Client, change: dict[str, Any], message: str
) -> None:
    status, body = client.send("/v1/completions", GOOD | change)
    assert status == (404 if "model" in change else 400)
    assert re.search(message, error_of(body)), body


def only_row(request: Any) -> Row:
    ((row,),) = request.rows(ByteTokenizer())
    return row


def test_a_row_has_all_settings_of_its_request() -> None:
    chosen = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.5}
    chosen["min_p"] = 0.1
    request = chosen | {"model": "tiny", "prompt": "a", "seed": 0, "stop": "ab", "cache_salt": "s"}
    row = only_row(decode(json.dumps(request).encode(), CompletionRequest))
    assert row.sampling == Sampling(0.5, 3, 0.9, 1.5, 0.1)
    assert (row.tokens, row.seed, row.stop, row.salt) == ([97], 0, "ab", "s")


def test_a_request_has_the_defaults_of_openai_and_a_seed_of_its_own() -> None:
    asked = decode(b'{"model": "tiny", "prompt": "a"}', CompletionRequest)
    one, two = (only_row(asked) for _ in range(2))
    assert (one.sampling, one.new_tokens, one.log_probs) == (Sampling(1.0), 16, None)
    assert one.seed != two.seed
    turn = only_row(decode(b'{"model": "tiny", "input": "a"}', ResponseRequest))
    assert (turn.sampling, turn.new_tokens, turn.store) == (Sampling(1.0), 256, True)


@pytest.mark.parametrize("every", [{"top_k": -1}, {"top_k": 0}, {"min_p": 0}])
def test_all_tokens_are_asked_for_as_of_other_servers(every: dict[str, Any]) -> None:
    request = {"model": "tiny", "prompt": "a"} | every
    row = only_row(decode(json.dumps(request).encode(), CompletionRequest))
    assert row.sampling == Sampling(1.0)


def test_options_without_effect_are_taken(client: Client) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0}
    status, body = client.send("/v1/completions", GOOD | neutral)
    assert status == 200, body


def test_wrong_ways_to_ask_are_refused(client: Client) -> None:
    asked = [
        (415, client.send("/v1/completions", GOOD, kind="text/plain")),
        (413, client.send("/v1/completions", GOOD | {"prompt": "x" * 30_000})),
        (405, client.send("/v1/completions")),
        (400, client.send("/v1/chat/completions", GOOD)),
        (404, client.send("/v1/embeddings", GOOD)),
        (404, client.send("/v1/models/huge")),
        (400, client.send("/v1/responses", {"model": "tiny", "input": "a", "tools": [{}]})),
    ]
    for previous in ("resp_1", f"resp_{'0' * 64}_{'0' * 16}"):
        request = {"model": "tiny", "input": "a", "previous_response_id": previous}
        asked.append((400, client.send("/v1/responses", request)))
    for wanted, (status, body) in asked:
        assert status == wanted
        error_of(body)


def malformed(count: int) -> Iterator[bytes]:
    """Requests that are wrong in one place, drawn from a seed."""
    draw = random.Random(0)
    values = [None, True, -2, 1e999, 10**30, "", "\ud800", [], [None], {}, {"a": 1}, [{}], -0.5]
    for number in range(count):
        body = json.dumps(GOOD).encode()
        if number % 3 == 0:  # damaged JSON
            yield body[: draw.randrange(len(body))] + draw.choice([b"\xff", b'"', b"[" * 2000, b""])
        elif number % 3 == 1:
            name = draw.choice(["prompt", "max_tokens", "logprobs", "seed", "top_k", "n"])
            wrong = [v for v in values if v is not None or name == "prompt"]
            value = draw.choice(wrong)
            if name == "prompt" and value == "\ud800":
                value = {}
            yield json.dumps(GOOD | {name: value}).encode()
        else:
            name = "".join(draw.choices("abcdefgh_", k=6))
            yield json.dumps(GOOD | {name: draw.choice(values[1:])}).encode()  # null is nothing


def test_300_malformed_requests_are_refused_in_one_line_each(client: Client) -> None:
    for body in malformed(300):
        status, told = client.send("/v1/completions", body)
        assert 400 <= status < 500, (body, told)
        error_of(told)
    assert client.complete("still there", max_tokens=1)


def test_bytes_that_are_no_http_are_refused(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        raw.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b" 400 " in raw.recv(1000).split(b"\r\n")[0]


def left_alone(client: Client, rows: int) -> None:
    deadline = time.monotonic() + 20
    while client.metric("rows") != rows:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(client: Client, stream: bool) -> None:
    left_alone(client, 0)
    request = {"model": "tiny", "prompt": "long", "max_tokens": 4000, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(request), headers)
    if stream:
        connection.getresponse().readline()
    left_alone(client, 1)
    before = client.metric("new_tokens_total")
    connection.close()
    left_alone(client, 0)
    assert client.metric("new_tokens_total") - before < 3900


def test_nobody_waits_for_a_client_that_leaves_as_a_piece_comes() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def take() -> list[int]:
        ticket = Ticket([Row([1])])
        ticket.put(0, Piece("a"))
        await ticket.watch(receive)
        return [len(await asyncio.wait_for(ticket.take(), 10)) for _ in range(2)]

    assert asyncio.run(take()) == [1, 0]


def test_a_row_is_decoded_at_most_once_after_its_client_has_left() -> None:
    app = app_of(MODEL)
    engine, late = app.state.service.engine, Counter[Row]()
    step = engine._step

    def counted(out: Any) -> None:
        late.update(going.row for going in engine._rows if going.row.left)
        step(out)

    engine._step = counted
    with running(app) as client:
        request = json.dumps(GOOD | {"max_tokens": 4000, "stream": True})
        streams = []
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", request, headers)
            streams.append((connection, connection.getresponse()))
        for number, (connection, answer) in enumerate(streams[1:], 1):
            for _ in range(number):
                answer.readline()
            answer.close()
            connection.close()
            left_alone(client, 8 - number)
        before = client.metric("new_tokens_total")
        while client.metric("new_tokens_total") < before + 3:
            time.sleep(0.01)
        assert client.metric("rows") == 1
        streams[0][1].close()
        streams[0][0].close()
        left_alone(client, 0)
    assert max(late.values(), default=0) <= 1


@pytest.mark.slow
def test_200_streams_at_once_are_decoded_together_and_give_what_each_gives_alone() -> None:
    openai = pytest.importorskip("openai")
    clients, tokens = 200, 16
    app = app_of(MODEL, limits=Limits(rows=clients))
    engine, together = app.state.service.engine, threading.Event()
    take, prompts = engine._take, [f"{number} bottles" for number in range(clients)]

    def patient() -> bool:
        """Take nothing before all have asked, so that no step depends on time."""
        while len(engine._arrived) < clients and not (together.is_set() or engine._stopped):
            time.sleep(0.01)
        together.set()
        return take()

    async def ask(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.wait_for(asyncio.gather(*map(one, prompts)), 120)

    engine._take = patient
    with running(app) as client:
        texts = asyncio.run(ask(client.url))
        assert client.metric("new_tokens_total") == clients * tokens
        assert client.metric("step_seconds_count") <= tokens + 4  # prompts are read between steps
    for prompt, text in zip(prompts, texts, strict=True):
        assert plain(text) == shown(continued(prompt.encode(), tokens))


def test_a_key_is_asked_for() -> None:
    with running(app_of(MODEL, key="secret"), key="secret") as client:
        assert client.send("/v1/models")[0] == 200
        for key in (None, "", "wrong"):
            status, body = Client(client.port, key).send("/v1/completions", GOOD)
            assert status == 401
            assert error_of(body) == "the key is missing or wrong"


def test_the_health_is_told_without_a_key() -> None:
    app = app_of(MODEL, key="secret")
    with running(app) as client:
        assert client.send("/health") == (200, b"")
        app.state.service.engine.end()
        assert client.send("/health") == (503, b"")


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_must_be_positive(value: float) -> None:
    with pytest.raises(InputError, match="the limit seconds must be positive, got"):
        Limits(seconds=value)


def test_limits_hold() -> None:
    limits = Limits(rows=2, waiting=1, length=40, new_tokens=30, seconds=0.3)
    with running(app_of(MODEL, limits=limits)) as client:
        status, body = client.send("/v1/completions", GOOD | {"prompt": "x" * 39})
        assert (status, "at most 40 tokens" in error_of(body)) == (400, True)
        with ThreadPoolExecutor(12) as pool:
            request = GOOD | {"max_tokens": 30}
            asked = [pool.submit(client.send, "/v1/completions", request) for _ in range(12)]
            found = {one.result()[0] for one in asked}
        assert found <= {200, 429, 503}
        assert 200 in found
    memory = MODEL.state_bytes(40)
    with running(app_of(MODEL, limits=Limits(memory=memory))) as client:
        assert client.complete("x" * 20, max_tokens=20)
        status, body = client.send("/v1/completions", GOOD | {"prompt": "x" * 200})
        assert (status, "shorten the text" in error_of(body)) == (400, True)
        with ThreadPoolExecutor(4) as pool:  # rows wait for memory
            asked = [pool.submit(client.complete, "y" * 20, max_tokens=20) for _ in range(4)]
            assert len({one.result()["choices"][0]["text"] for one in asked}) == 1


class Watched(Metrics):
    """Knows the largest number of rows in a step."""

    most = 0

    def step(self, rows: int, seconds: float) -> None:
        self.most = max(self.most, rows)
        super().step(rows, seconds)


@pytest.mark.parametrize(
    ("limits", "lengths", "most"),
    [
        (Limits(), [24] * 4, 4),
        (Limits(rows=2), [24] * 4, 2),
        (Limits(memory=3 * MODEL.state_bytes(24)), [24] * 4, 3),
        (Limits(memory=MODEL.state_bytes(24) + MODEL.state_bytes(48)), [24, 48], 1),
    ],
)
@pytest.mark.parametrize("before", ["", "lim"])
def test_rows_that_are_beyond_a_limit_wait(
    limits: Limits, lengths: list[int], most: int, before: str
) -> None:
    """A row takes as much memory as the longest, also if it continues another text."""
    ends, done, metrics = list[Piece](), threading.Event(), Watched()

    def deliver(pieces: list[tuple[Row, Piece]]) -> None:
        ends.extend(piece for _, piece in pieces if piece.finish or piece.error)
        if len(ends) == len(lengths):
            done.set()

    kept = PrefixStates(MODEL, every=16)
    engine = Engine(ByteTokenizer(), kept, limits=limits, deliver=deliver, metrics=metrics)
    after = kept.read(list(before.encode())).key if before else None
    for length in lengths:
        tokens = list("limits".removeprefix(before).encode())
        engine.submit(Row(tokens, after, new_tokens=length - 6))
    engine.start()
    assert done.wait(60)
    engine.stop()
    assert [piece.finish for piece in ends] == ["length"] * len(lengths)
    assert metrics.most == most


@pytest.mark.parametrize(("latest", "sizes"), [(3600, [4, 16, 16, 4]), (0, [4] * 10)])
def test_pieces_of_many_rows_are_delivered_together_and_in_time(
    monkeypatch: pytest.MonkeyPatch, latest: float, sizes: list[int]
) -> None:
    monkeypatch.setattr("stateline.serve.engine.PER_STEP", 1)
    monkeypatch.setattr("stateline.serve.engine.LATEST", latest)
    delivered, done = list[list[tuple[Row, Piece]]](), threading.Event()

    def deliver(pieces: list[tuple[Row, Piece]]) -> None:
        delivered.append(pieces)
        if any(piece.finish for _, piece in pieces):
            done.set()

    kept, metrics = PrefixStates(MODEL), Metrics()
    engine = Engine(ByteTokenizer(), kept, limits=Limits(), deliver=deliver, metrics=metrics)
    for row in range(4):
        engine.submit(Row([row], new_tokens=10))
    engine.start()
    assert done.wait(60)
    engine.stop()
    assert [len(pieces) for pieces in delivered if pieces] == sizes


def test_all_texts_are_told_of_the_end_and_no_more_are_taken() -> None:
    ended, begun = Counter[Row](), threading.Event()

    def deliver(pieces: list[tuple[Row, Piece]]) -> None:
        ended.update(row for row, piece in pieces if piece.error)
        engine.end()
        begun.set()

    kept, limits = PrefixStates(MODEL), Limits(rows=1)
    engine = Engine(ByteTokenizer(), kept, limits=limits, deliver=deliver, metrics=Metrics())
    rows = [Row([1], new_tokens=4000) for _ in range(3)]
    for row in rows:
        engine.submit(row)
    engine.start()
    assert begun.wait(60)
    engine.stop()
    assert ended == Counter(rows)
    with pytest.raises(StoppedError, match="the server is ending"):
        engine.submit(Row([1]))


def test_graphs_outlive_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Tensor] = []

    class ByGraphs(Session):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.use_graphs(record)

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        logits = call()
        recorded.append(logits)
        return lambda: logits.copy_(call()), logits

    monkeypatch.setattr("stateline.serve.engine.Session", ByGraphs)
    with running(app_of(MODEL)) as client:
        texts = [client.complete("one after the other", max_tokens=4) for _ in range(2)]
    assert texts[0]["choices"] == texts[1]["choices"]
    assert len(recorded) == 1


def test_a_text_for_which_no_place_is_left_to_wait_is_refused() -> None:
    kept, limits = PrefixStates(MODEL), Limits(waiting=2)
    engine = Engine(ByteTokenizer(), kept, limits=limits, deliver=print, metrics=Metrics())
    for _ in range(2):
        engine.submit(Row([1]))
    with pytest.raises(BusyError, match="2 requests wait already"):
        engine.submit(Row([1]))


class OfWords(ByteTokenizer):
    """Leaves out the space before the first word of a text, as SentencePiece does."""

    def decoder(self) -> Decoder:
        return _OfWords()


class _OfWords(Decoder):
    begun = False

    def push(self, token: int) -> str:
        text = "" if token == ord(" ") and not self.begun else chr(token)
        self.begun = True
        return text

    def finish(self) -> str:
        return ""


def test_text_offsets_count_a_space_after_the_prompt() -> None:
    told = CompletionLogProbs(OfWords(), Row(b"a"))
    for token in b" bc":
        told.add([Piece(log_probs=(LogProbs(token, 0.0, ()),))])
    assert told.all["text_offset"] == [0, 1, 2]


def test_an_empty_turn_goes_on_within_the_text() -> None:
    model = LanguageModel(ModelConfig("lstm", 256, 8, tie_embeddings=False, head_bias=True)).eval()
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()[ord(" ")] = 1.0
    app = make_app(PrefixStates(model), OfWords(), "tiny")
    with running(app) as client:
        first = client.respond("a", max_output_tokens=3)
        then = client.respond("", max_output_tokens=3, previous_response_id=first["id"])
    for answer in (first, then):
        assert answer["output"][0]["content"][0]["text"] == "   "


def test_a_conversation_that_is_too_long_is_refused() -> None:
    with running(app_of(MODEL, limits=Limits(length=40))) as client:
        first = client.respond("x" * 20)
        request = {"model": "tiny", "max_output_tokens": 4, "previous_response_id": first["id"]}
        status, body = client.send("/v1/responses", request | {"input": "y" * 5})
        assert (status, error_of(body)) == (
            400,
            "a text may have at most 40 tokens, new ones included, got 41",
        )
        assert client.send("/v1/responses", request | {"input": "y" * 4})[0] == 200


def test_a_text_ends_in_its_time() -> None:
    with running(app_of(MODEL, limits=Limits(seconds=0.2))) as client:
        answer = client.complete("slow", max_tokens=4000)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 4000
        told = client.respond("slow", max_output_tokens=4000)
        assert told["usage"]["output_tokens"] < 4000
        assert (told["status"], told["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_seconds"},
        )


def test_a_conversation_outlives_the_server(tmp_path: Path) -> None:
    def app() -> Any:
        return app_of(MODEL, prefixes=PrefixStates(MODEL, every=16, folder=tmp_path))

    with running(app()) as client:
        first = client.respond("kept over a restart. ")
        here = client.respond("go on", previous_response_id=first["id"])
    with running(app()) as client:
        there = client.respond("go on", previous_response_id=first["id"])
        assert there["output"][0]["content"] == here["output"][0]["content"]
        kept = client.complete("kept over a restart. ")["usage"]["prompt_tokens_details"]
        assert kept["cached_tokens"] == 21


def test_the_state_after_a_stored_response_is_written_at_once(tmp_path: Path) -> None:
    with running(app_of(MODEL, prefixes=PrefixStates(MODEL, folder=tmp_path))) as client:
        client.respond("lost with the process", store=False)
        assert not [*tmp_path.iterdir()]
        client.respond("kept in any case")
        assert len([*tmp_path.iterdir()]) == 1


def test_clients_whose_texts_go_on_at_the_end_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stateline.serve.run.GRACE", 1)
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 10**6}
    app = app_of(opinionated("h3"), limits=Limits(new_tokens=10**6))
    with ThreadPoolExecutor() as pool, running(app) as client:
        asking = [
            pool.submit(client.send, "/v1/completions", asked | {"stream": stream})
            for stream in (False, True)
        ]
        while client.metric("rows") < 2:
            time.sleep(0.01)
    (status, whole), (begun, pieces) = (future.result() for future in asking)
    assert (status, begun) == (503, 200)
    *_, last, done = re.findall("data: (.*)", pieces.decode())
    assert (json.loads(last), done) == (json.loads(whole), "[DONE]")
    assert "ending" in last
    assert "Traceback" not in capsys.readouterr().err


def test_a_stream_that_its_client_does_not_read_ends_with_the_server() -> None:
    async def main() -> None:
        ticket, never = Ticket([Row([97])]), asyncio.Event()
        ticket.put(0, Piece("a", 1))
        given = CompletionRequest(model="tiny", prompt="a")
        stream = Stream(ticket, CompletionAnswer("tiny", ByteTokenizer(), given, ticket.rows))
        sending = asyncio.create_task(stream({}, lambda: never.wait(), lambda _: never.wait()))
        await asyncio.sleep(0.01)
        sending.cancel()
        await sending
        assert ticket.left

    asyncio.run(main())


def test_a_model_that_gives_nan_fails_its_clients_and_not_the_server() -> None:
    model = opinionated("lstm")
    with running(app_of(model)) as client:
        with torch.no_grad():
            model.embedding.weight.fill_(float("nan"))
        status, body = client.send("/v1/completions", GOOD)
        assert (status, "the model gives NaN" in error_of(body)) == (400, True)
        assert client.send("/v1/models")[0] == 200


def test_a_text_that_gives_nan_ends_alone() -> None:
    model, sick = opinionated("lstm"), [97, 126]
    with torch.no_grad():
        model.embedding.weight[126] = float("nan")
    found: dict[int, list[Piece]] = {2: [], 3: [], 4: []}
    done = threading.Event()

    def deliver(pieces: list[tuple[Row, Piece]]) -> None:
        for row, piece in pieces:
            found[len(row.tokens)].append(piece)
        if all(pieces and (pieces[-1].finish or pieces[-1].error) for pieces in found.values()):
            done.set()

    kept = PrefixStates(model)
    engine = Engine(ByteTokenizer(), kept, limits=Limits(), deliver=deliver, metrics=Metrics())
    healthy = [[1, 2, 3], [4, 5, 6, 7]]
    for tokens in (healthy[0], sick, healthy[1]):
        engine.submit(Row(tokens, new_tokens=8, log_probs=0))
    engine.start()
    assert done.wait(60)
    engine.stop()
    (ended,) = found[2]
    assert "the model gives NaN after 2 tokens" in str(ended.error)
    for tokens in healthy:
        made = [piece.log_probs[0].token for piece in found[len(tokens)]]
        assert made == generate(model, torch.tensor([tokens]), 8)[0].tolist()


def test_a_row_for_which_there_is_no_memory_fails_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("stateline.serve.engine.cat_states", full)
    with running(app_of(MODEL)) as client:
        status, body = client.send("/v1/completions", GOOD)
        assert (status, error_of(body)) == (500, "the server has failed; its log says why")
        counted = 'stateline_requests_total{path="/v1/completions",status="500"} 1.0'
        assert counted in client.send("/metrics")[1].decode()
        monkeypatch.undo()
        assert client.send("/v1/completions", GOOD)[0] == 200


def test_seeds_are_rows_of_their_own() -> None:
    state = seeded(prefill(MODEL, torch.tensor([[1, 2]])), 5)
    assert state.random.tolist() == [[5, 0, 0]]
