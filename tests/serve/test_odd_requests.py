"""Some 300 odd requests: answered as by OpenAI or vLLM, or refused in one line.

The two differ (OpenAI refuses a temperature of 3 and "1" as a number, vLLM takes both); a value is
``GOOD`` if both answer it, ``BAD`` if both refuse it, and ``EITHER`` if they differ. Sources: the
OpenAPI description of OpenAI's interface, and the protocol classes of vLLM's server.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stateline.data import ByteTokenizer
from stateline.generate import PrefixStates
from stateline.serve import make_app
from tests.serve.running import Client, opinionated, running

pytestmark = [pytest.mark.slow, pytest.mark.cpu, pytest.mark.usefixtures("unannotated")]

GOOD, BAD, EITHER = (200,), (400, 404, 422), (200, 400, 422)
NAN, INFINITE = float("nan"), float("inf")  # no JSON, but Python's clients write them

BASE: dict[str, dict[str, Any]] = {
    "completions": {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    "chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 2,
    },
    "responses": {"model": "tiny", "input": "ab", "max_output_tokens": 2},
}

OF_ALL: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([None, 0, 0.0, 1, 1.5, 2], [-0.1, [], {}, "warm", NAN, INFINITE]),
    "top_p": ([None, 0.1, 1, 1.0], [-0.1, 1.1, [0.5], {}, "most", NAN]),
    "seed": ([None, 0, 7, 2**31], [[], {}, "seven"]),
    "stream": ([None, False], [[], {}, "perhaps", 7]),
    "user": ([None, "", "me"], [[], {}]),
    "metadata": ([None, {}, {"a": "b"}], [[1], "text", 7]),
    "model": ([], [None, [], {}, 7, "another"]),
}
"""Fields with the values that both answer, and those that both refuse."""

OF_TEXTS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([None, 1, 2], [0, -1, [], {}, "many", 10**9]),
    "presence_penalty": ([None, 0, -2, 2, 0.5], [[], {}, "some", NAN]),
    "frequency_penalty": ([None, 0, -2, 2, 0.5], [[], {}, "some", NAN]),
    "logit_bias": ([None, {}, {"97": 1}, {"97": -100}], [[1], "a", {"a": 1}, {"97": "b"}]),
    "stop": ([None, "x", ["x", "yz"], []], [{}, [{}], [[]], 7]),
}

OF_ONE: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "completions": {
        "prompt": (
            ["a", ["a"], ["a", "b"], [97], [97, 98], [[97], [98, 99]], "é😀", "a\u0000b", "\n"],
            [{}, [{}], [[{}]], [["a"]], [-1], [10**9], ["a", 1], 7, True],
        ),
        "max_tokens": ([None, 1, 3], [-1, [], {}, "many", 10**12]),
        "logprobs": ([None, 0, 1, 5], [-1, [], {}, "all", 10**6]),
        "echo": ([None, False, True], [[], {}, "perhaps"]),
        "suffix": ([None, ""], [[], {}]),
        "best_of": ([None, 1], [0, -1, [], {}, "all"]),
        "stream_options": ([None], [[], 7, "usage"]),
    },
    "chat/completions": {
        "messages": (
            [
                [{"role": "user", "content": ""}],
                [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
                [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                [{"role": "user", "content": "a", "name": "me"}],
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
                + [{"role": "user", "content": "c"}],
            ],
            [
                None,
                {},
                "a",
                7,
                [7],
                ["a"],
                [{}],
                [{"role": "user"}],
                [{"role": 7, "content": "a"}],
                [{"role": "user", "content": 7}],
                [{"role": "user", "content": [7]}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": [{"type": "nothing", "text": "a"}]}],
            ],
        ),
        "max_tokens": ([None, 1, 3], [-1, [], {}, "many", 10**12]),
        "max_completion_tokens": ([None, 1, 3], [-1, [], {}, "many", 10**12]),
        "logprobs": ([None, False, True], [[], {}, "all"]),
        "tools": ([None], [{}, 7, "hammer", [7]]),
        "tool_choice": ([None, "none"], [7, [], "hammer"]),
        "response_format": ([None, {"type": "text"}], [7, [], "text", {"type": "poem"}]),
        "stream_options": ([None], [[], 7, "usage"]),
    },
    "responses": {
        "input": (
            ["a", [{"role": "user", "content": "a"}], "é😀"],
            [{}, 7, True, [{}], [{"role": "user"}], [{"role": "user", "content": 7}]],
        ),
        "instructions": ([None, ""], [[], {}, 7]),
        "max_output_tokens": ([None, 1, 3, 16], [-1, 0, [], {}, "many"]),
        "previous_response_id": ([None], ["", "resp_none", [], {}, 7]),
        "store": ([None, False, True], [[], {}, "perhaps"]),
        "truncation": ([None, "disabled"], [7, [], "some"]),
        "tools": ([None, []], [{}, 7, "hammer", [7]]),
        "background": ([None, False], [[], {}, "perhaps"]),
        "include": ([None, []], [{}, 7, [7]]),
    },
}

EXTRA: dict[str, tuple[list[Any], list[Any]]] = {
    "top_k": ([-1, 1, 5], [-2, [], {}, "few"]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1, [], {}, "few"]),
    "repetition_penalty": ([1, 1.5], [0, -1, [], {}, "some"]),
    "min_tokens": ([0, 1], [-1, 10**6, [], {}, "few"]),
    "stop_token_ids": ([[], [97]], [{}, ["a"], [[]], 7]),
    "ignore_eos": ([False, True], [[], {}, "perhaps"]),
    "skip_special_tokens": ([False, True], [[], {}, "perhaps"]),
}
"""Fields of vLLM's, which OpenAI does not have: good and bad by vLLM alone."""

BODIES: list[tuple[bytes, tuple[int, ...]]] = [
    (b"", BAD),
    (b"{", BAD),
    (b"[]", BAD),
    (b"null", BAD),
    (b'"text"', BAD),
    (b"7", BAD),
    (b"\xff\xfe", BAD),
    (b"{}", BAD),
    (b'{"model": "tiny"}', BAD),
    (b"[" * 10_000, BAD),
    (b'{"model": "tiny", "prompt": "a", "input": "a", "nothing": 1}', EITHER),
    (b'{"model": "tiny", "prompt": "a", "prompt": "b", "max_tokens": 1}', EITHER),
]


def cases() -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    """Endpoint, field, value, and the statuses that are right."""
    for path, own in OF_ONE.items():
        fields = OF_ALL | own | (OF_TEXTS if path != "responses" else {})
        for name, (good, bad) in (fields | EXTRA).items():
            yield from ((path, name, value, GOOD) for value in good)
            yield from ((path, name, value, BAD) for value in bad)
        for name in ("temperature", "top_p", "seed"):
            yield from ((path, name, value, EITHER) for value in (True, "1", 10**30, 0.5, -1))
        yield path, "nothing", 1, EITHER


def test_odd_requests_are_answered_or_refused_in_one_line() -> None:
    wrong, count = [], 0
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    app = make_app(PrefixStates(opinionated()), tokenizer, "tiny")
    with running(app) as client:
        for path, name, value, wanted in cases():
            body = json.dumps(BASE[path] | {name: value}).encode()
            wrong += _looked_at(client, path, body, wanted)
            count += 1
        for path in BASE:
            for body, wanted in BODIES:
                wrong += _looked_at(client, path, body, wanted)
                count += 1
        assert client.complete("ab")["choices"]
    assert count > 300
    assert not wrong, "\n".join([f"{len(wrong)} of {count}:", *wrong])


def _looked_at(client: Client, path: str, body: bytes, wanted: tuple[int, ...]) -> list[str]:
    status, answer = client.send(f"/v1/{path}", body)
    told = f"{path} {body[:150]!r}: {status} {answer[:200]!r}"
    if status not in wanted:
        return [told]
    if status == 200:
        return []
    message = json.loads(answer)["error"]["message"]
    return [] if message and "\n" not in message and len(message) < 400 else [told]
