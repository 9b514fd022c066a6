"""Limits of the HTTP side: slow and half-open connections, hosts, bytes, and time while reading."""

import json
import math
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stateline.generate import PrefixStates, prefixes
from stateline.serve import Limits, Row, reading
from stateline.serve import run as run_module
from stateline.serve.reading import LEAST, READ_AT_ONCE, TURN, Prompt, Reader
from tests.serve.running import Client, app_of, opinionated, running

pytestmark = [pytest.mark.usefixtures("unannotated"), pytest.mark.cpu]

MODEL = opinionated()
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-"


def closed(connection: socket.socket, seconds: float = 10) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@contextmanager
def half_open(client: Client, count: int, sent: bytes = HALF) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
            one.sendall(sent)
            found.append(one)
        yield found


def test_half_open_connections_make_room_for_clients(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "CONNECTIONS", 20)
    with running(app_of(MODEL)) as client, half_open(client, 300) as many:
        for _ in range(3):
            assert client.send("/health")[0] == 200
        assert client.complete("still there", max_tokens=1)
        assert sum(closed(one, 0.2) for one in many[:100]) > 90
    assert "Traceback" not in capfd.readouterr().err


def test_the_limit_of_connections_follows_from_that_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    assert run_module.connections() == 128
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert run_module.connections() == run_module.CONNECTIONS


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF,
        HALF + b"Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nothing", "header", "body", "second"],
)
def test_a_request_that_does_not_arrive_in_time_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "ARRIVAL", 0.3)
    with running(app_of(MODEL)) as client, half_open(client, 1, sent) as (one,):
        begin = time.monotonic()
        if sent.startswith(b"GET"):
            one.settimeout(10)
            assert b"200 OK" in one.recv(1000)
            one.sendall(b"GET /he")
        assert closed(one)
        assert time.monotonic() - begin < 5


def test_an_idle_connection_and_a_long_answer_are_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "ARRIVAL", 0.2)
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(app_of(MODEL)) as client, half_open(client, 1, asked) as (one,):
        one.settimeout(10)
        assert b"200 OK" in one.recv(1000)
        time.sleep(0.5)
        one.sendall(asked)
        assert b"200 OK" in one.recv(1000)
        assert (
            client.complete("a long answer", max_tokens=1500)["usage"]["completion_tokens"] == 1500
        )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:80", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_local_server_has_local_names_alone(host: str, status: int) -> None:
    with running(app_of(MODEL, local=True)) as client:
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        with half_open(client, 1, request.encode()) as (one,):
            assert f" {status} ".encode() in one.recv(1000).split(b"\r\n")[0]


def test_the_bytes_of_all_requests_are_bounded_and_given_back() -> None:
    app = app_of(MODEL, limits=Limits(bodies=3000, new_tokens=100_000))
    service = app.state.service
    with running(app) as client:
        body = json.dumps({"model": "tiny", "prompt": "x" * 1500, "max_tokens": 50_000}).encode()
        with ThreadPoolExecutor() as pool:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            )
            head += "\r\nContent-Type: application/json\r\n\r\n"
            with half_open(client, 1, head.encode() + body):
                while service.bodies == 0:
                    time.sleep(0.01)
                status, told = pool.submit(client.send, "/v1/completions", body).result()
                assert (status, b"too many bytes" in told) == (429, True)
        deadline = time.monotonic() + 20
        while service.bodies:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.complete("x" * 1500, max_tokens=1)


def test_a_continuation_beyond_a_limit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = app_of(MODEL, limits=Limits(length=2000))
    with running(app) as client:
        first = client.respond("a beginning")
        monkeypatch.setattr(app.state.service.engine.prefixes, "pieces", None)
        for length in (3000, 1990):  # beyond the limit by itself, and together with the beginning
            given = {"model": "tiny", "input": [7] * length, "previous_response_id": first["id"]}
            status, body = client.send("/v1/responses", given | {"max_output_tokens": 1})
            assert (status, b"at most 2000 tokens" in body) == (400, True), body


def test_time_runs_from_the_arrival_also_while_a_prompt_is_read_or_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = app_of(MODEL, limits=Limits(seconds=0.5, rows=1))
    prefixes = app.state.service.engine.prefixes

    def slow(tokens: Any, *_: Any) -> Any:
        while True:
            time.sleep(0.01)
            yield 1024

    monkeypatch.setattr(prefixes, "pieces", slow)
    with running(app) as client, ThreadPoolExecutor() as pool:
        given = {"model": "tiny", "prompt": "slow", "max_tokens": 1}
        asked = [pool.submit(client.send, "/v1/completions", given) for _ in range(3)]
        for future in asked:
            status, body = future.result()
            assert (status, b"was not read within 0.5 seconds" in body) == (503, True)


def test_prompts_are_read_in_turns_the_shortest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: 0.0))
    kept = PrefixStates(MODEL, every=16)
    reader = Reader(kept, Limits())
    lengths = [5000, 300, 2600, 20]
    for number, length in enumerate(lengths):
        prompt = Prompt([Row([number] * length)], math.inf)
        reader.waiting.append(prompt)
    order, turns = list[int](), 0
    while reader.waiting or reader.reading:
        assert not list(reader.read(0, 0))
        turns += 1
        order += [len(prompt.tokens) for prompt in reader.take(0, 0)]
        if turns == 2:
            reader.waiting.append(Prompt([Row([9] * 10)], math.inf))
    assert order == [20, 300, 10, 2600, 5000]


def test_while_texts_are_decoded_reading_takes_half_of_the_time() -> None:
    reader = Reader(PrefixStates(MODEL), Limits())

    def slow() -> Any:
        while True:
            time.sleep(0.05)
            yield 1024

    long = Prompt([Row([1] * 10)], time.monotonic() + 600)
    long.reading, long.left = slow(), 1 << 20
    reader.reading.append(long)
    list(reader.read(1, 1))
    left = long.left
    assert list(reader.read(1, 1)) == []
    assert long.left == left  # it rests
    fresh = Prompt([Row([1, 2])], time.monotonic() + 600)
    reader.waiting.append(fresh)
    assert list(reader.read(1, 1)) == []
    assert fresh.found is not None
    time.sleep(0.06)
    list(reader.read(1, 1))
    assert long.left < left


@pytest.mark.parametrize("scored", [False, True])
def test_a_piece_has_as_many_tokens_as_the_model_reads_in_a_turn(
    scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now, read = opinionated("h3(d_state=8)"), 0.0, list[int]()

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **more: Any) -> Any:
            nonlocal now
            read.append(next(one for one in given if isinstance(one, torch.Tensor)).shape[1])
            now += read[-1] * cost
            return call(*given, **more)

        return called

    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now))
    if scored:
        monkeypatch.setattr(model, "forward_chunk", slow(model.forward_chunk))
    else:
        monkeypatch.setattr(prefixes, "extend", slow(prefixes.extend))
    reader = Reader(PrefixStates(model), Limits())

    def read_of(length: int) -> list[int]:
        reader.waiting.append(Prompt([Row([length % 256] * length, scored=scored)], math.inf))
        read.clear()
        times = []
        while reader.waiting or reader.reading:
            begin = now
            assert not list(reader.read(0, 0))
            times.append(now - begin)
        assert sum(read) == length - 1
        assert max(times[1:]) <= 2 * max(TURN, LEAST * cost)
        return read

    cost = 1e-5  # seconds for a token
    assert max(read_of(5000)) == READ_AT_ONCE
    cost = TURN / 200
    assert max(read_of(3000)[1:]) == 128
    cost = TURN
    assert max(read_of(300)[1:]) == LEAST
    cost = 1e-5
    assert max(read_of(5001)) == READ_AT_ONCE


@pytest.mark.slow
def test_no_short_text_waits_for_the_end_of_a_long_prompt() -> None:
    model = opinionated("h3(d_state=8)")
    app = app_of(model, prefixes=PrefixStates(model))

    def seconds(client: Client, tokens: list[int], new: int = 16) -> float:
        begin = time.monotonic()
        client.complete(tokens, max_tokens=new)
        return time.monotonic() - begin

    def short(client: Client) -> float:
        """The longest of 20 at once."""
        with ThreadPoolExecutor(20) as pool:
            return max(pool.map(lambda n: seconds(client, [n] * 40), range(20)))

    with running(app) as client, ThreadPoolExecutor(1) as pool:
        alone, beside = max(short(client) for _ in range(5)), list[float]()
        long = pool.submit(seconds, client, [99] * (1 << 17), 1)
        while not long.done():
            beside.append(short(client))
    assert len(beside) > 1
    assert max(beside[:-1]) < alone + long.result() / 3
