"""Ask a server for minutes, check every answer, and time short texts beside a very long one.

Run it: python examples/serve_soak.py --minutes 15

A model with random weights is served on this machine. Clients send requests of all kinds; each
greedy text must equal that of `stateline.generate`, and no answer may be a failure of the server.
Then short texts are asked for alone, and while a prompt of a million tokens is read.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from stateline import LanguageModel, ModelConfig, save_model
from stateline.data import ByteTokenizer
from stateline.generate import generate


def ask(url: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    data = json.dumps({"model": "model", **request}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/completions", data, headers), timeout=3600
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def memory(pid: int) -> float:
    """Resident memory of a process in MiB (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


def kept(url: str) -> float:
    """MiB of the kept states in the server's memory."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics") as answer:
        found = re.search(r'state_bytes{where="memory"} (\S+)', answer.read().decode())
    return 0.0 if found is None else float(found[1]) / 2**20


def client(
    url: str, model: LanguageModel, seed: int, end: float, counts: Counter[str], wrong: list[str]
) -> None:
    """Ask until the end; note what was answered, and what was wrong."""
    draw = random.Random(seed)
    while time.monotonic() < end and not wrong:
        tokens = draw.choices(range(97, 123), k=draw.choice([1, 3, 30, 300, 2000]))
        new = draw.choice([1, 2, 8, 40])
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("greedy", {"temperature": 0}),
            ("sampled", {"temperature": 1.5, "top_p": 0.9, "n": 2}),
            ("penalties", {"frequency_penalty": 1.0, "min_tokens": 2}),
            ("refused", {"temperature": -1}),
        ]
        kind, more = draw.choice(kinds)
        status, body = ask(url, {"prompt": tokens, "max_tokens": new, **more})
        counts[f"{kind} {status}"] += 1
        if status != (400 if kind == "refused" else 200):
            wrong.append(f"{kind}: {status} {str(body)[:200]}")
        elif kind == "greedy":
            wanted = generate(model, torch.tensor([tokens]), new)[0]
            text = re.sub("[\ud800-\udfff]", "\ufffd", ByteTokenizer().decode(wanted.tolist()))
            if body["choices"][0]["text"] != text:
                wrong.append(f"another text: {body['choices'][0]['text']!r} for {text!r}")


def soak(url: str, model: LanguageModel, pid: int, minutes: float) -> None:
    """Four clients at once; memory every minute."""
    counts, wrong, begin = Counter[str](), list[str](), time.monotonic()
    given = (begin + 60 * minutes, counts, wrong)
    clients = [threading.Thread(target=client, args=(url, model, n, *given)) for n in range(4)]
    for one in clients:
        one.start()
    while any(one.is_alive() for one in clients):
        print(
            f"{(time.monotonic() - begin) / 60:4.1f} minutes, {sum(counts.values()):6,} requests: "
            f"{memory(pid):.0f} MiB, of which kept states have {kept(url):.0f}",
            flush=True,
        )
        clients[0].join(60)
        for one in clients if time.monotonic() > given[0] else ():
            one.join()
    print(
        f"{sum(counts.values()):,} requests in {minutes:g} minutes: {dict(sorted(counts.items()))}"
    )
    print(
        f"memory {memory(pid):.0f} MiB, of which kept states have {kept(url):.0f}; "
        f"wrong: {wrong or 'none'}",
        flush=True,
    )


def beside(url: str, length: int, count: int) -> None:
    """Short texts alone, and beside a prompt of ``length`` tokens."""

    def short(number: int) -> float:
        begin = time.perf_counter()
        status, _ = ask(url, {"prompt": f"short {number}", "max_tokens": 8})
        assert status == 200
        return time.perf_counter() - begin

    ask(url, {"prompt": [97] * 3000, "max_tokens": 8})  # compiles what is not compiled yet
    alone = [short(n) for n in range(count)]
    said: list[int] = []
    prompt = [97 + n % 26 for n in range(length)]
    request = {"prompt": prompt, "max_tokens": 1, "cache_salt": "long"}
    long = threading.Thread(target=lambda: said.append(ask(url, request)[0]))
    begin = time.perf_counter()
    long.start()
    time.sleep(1)  # it has arrived
    together = [short(n) for n in range(count)]
    still = long.is_alive()
    long.join()
    seconds = time.perf_counter() - begin
    print(
        f"a prompt of {length:,} tokens: status {said[0]} after {seconds:.1f} s, "
        f"{'still read' if still else 'read'} when {count} short texts were done; these took "
        f"{max(alone):.2f} s at most alone, {max(together):.2f} s beside it"
    )


def main(
    pattern: str, width: int, minutes: float, length: int, short: int, state_memory: int
) -> None:
    """Serve a model in a process of its own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=width)).eval()
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        command = [sys.executable, "-m", "stateline", "serve", f"{folder}/model", "--port", "0"]
        command += ["--device", "cpu", "--max_seconds", "3600"]
        command += ["--state_memory", str(state_memory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split(" at ")[1].strip()
                soak(url, model, server.pid, minutes)
                beside(url, length, short)
            finally:
                server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pattern", default="h3*2")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--length", type=int, default=1_000_000)
    parser.add_argument("--short", type=int, default=20)
    parser.add_argument("--state_memory", type=int, default=256, help="MiB of kept states")
    main(**vars(parser.parse_args()))
