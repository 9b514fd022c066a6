"""A server in a thread of the test, and a client of the standard library."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from starlette.applications import Starlette

from stateline.data import ByteTokenizer
from stateline.generate import PrefixStates
from stateline.models.config import ModelConfig
from stateline.models.language_model import LanguageModel
from stateline.serve import listen, make_app, make_server


def opinionated(pattern: str = "h3(d_state=8) attention(position=rope)") -> LanguageModel:
    """A model of bytes whose answers depend on all that it has read."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(pattern, 256, 16, tie_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def app_of(
    model: LanguageModel, *, prefixes: PrefixStates | None = None, **settings: Any
) -> Starlette:
    kept = PrefixStates(model, every=16) if prefixes is None else prefixes
    return make_app(kept, ByteTokenizer(), "tiny", **settings)


class Client:
    """Sends JSON to a server."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.key = port, key
        self.url = f"http://127.0.0.1:{port}/v1"

    def send(
        self, path: str, body: Any = None, *, method: str = "", kind: str = "application/json"
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": kind} | (
            {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}
        )
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def complete(self, prompt: Any, **given: Any) -> dict[str, Any]:
        given = {"model": "tiny", "temperature": 0, "max_tokens": 12} | given
        status, body = self.send("/v1/completions", {"prompt": prompt, **given})
        assert status == 200, body
        return json.loads(body)

    def respond(self, text: Any, **given: Any) -> dict[str, Any]:
        given = {"model": "tiny", "temperature": 0, "max_output_tokens": 12} | given
        status, body = self.send("/v1/responses", {"input": text, **given})
        assert status == 200, body
        return json.loads(body)

    def metric(self, name: str) -> float:
        lines = self.send("/metrics")[1].decode().splitlines()
        (line,) = (line for line in lines if line.startswith(f"stateline_{name} "))
        return float(line.split()[1])


@contextmanager
def running(app: Starlette, key: str | None = None) -> Iterator[Client]:
    """Serve until the end of the block."""
    server, listening = make_server(app), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Client(listening.getsockname()[1], key)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
