"""Measure a server under load, a long conversation, and speculative decoding.

Run it: python examples/serve_load.py

A model with random weights is served on this machine. 200 clients of the package openai ask for
streams at once, and some of them one after the other: tokens per second, and the processor time of
the server and of the clients per token. A conversation of 50,000 tokens gets one more turn. Finally
two models are decoded with and without a draft: one where it helps, and one where it does not.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from openai import AsyncOpenAI

from stateline import LanguageModel, ModelConfig, save_model
from stateline.generate import Session, Speculation, prefill


class Speed(NamedTuple):
    """Tokens per second, and processor time per token of the server and of the clients, in ms."""

    tokens: float
    server: float
    clients: float


def processor_time(pid: int) -> float:
    """Seconds that a process has computed (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def streams(client: AsyncOpenAI, pid: int, count: int, together: int, tokens: int) -> Speed:
    """The speed of ``count`` streams, of which ``together`` run at once."""
    gate = asyncio.Semaphore(together)

    async def one(number: int) -> int:
        async with gate:
            stream = await client.completions.create(
                model="model",
                prompt=f"stream number {number}: ",
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                usage = chunk.usage
            return usage.completion_tokens

    begin, server, own = time.perf_counter(), processor_time(pid), time.process_time()
    total = sum(await asyncio.gather(*map(one, range(count))))
    spent = processor_time(pid) - server, time.process_time() - own
    return Speed(total / (time.perf_counter() - begin), *(1000 * s / total for s in spent))


async def load(client: AsyncOpenAI, pid: int, clients: int, tokens: int) -> None:
    """Streams one by one and at once, in turn."""
    await streams(client, pid, 2, 1, 8)
    for _ in range(3):
        alone = await streams(client, pid, max(1, clients // 10), 1, tokens)
        together = await streams(client, pid, clients, clients, tokens)
        print(
            f"one by one {alone.tokens:,.0f} tokens/s, {clients} at once {together.tokens:,.0f}: "
            f"{together.tokens / alone.tokens:.1f}x; processor time of the server per token "
            f"{alone.server:.2f} and {together.server:.2f} ms: "
            f"{alone.server / together.server:.1f}x less; of the clients {alone.clients:.2f} and "
            f"{together.clients:.2f} ms",
            flush=True,
        )


async def conversation(client: AsyncOpenAI, length: int) -> None:
    """A long conversation, and one more turn."""
    text = "a long conversation " * (length // 20)
    begin = time.perf_counter()
    first = await client.responses.create(model="model", input=text, max_output_tokens=8)
    middle = time.perf_counter()
    second = await client.responses.create(
        model="model", input=" go on", previous_response_id=first.id, max_output_tokens=8
    )
    end = time.perf_counter()
    print(f"{first.usage.input_tokens:,} tokens read in {middle - begin:.2f} s")
    read = second.usage.input_tokens - first.usage.total_tokens
    print(f"the next turn reads {read} tokens, and takes {end - middle:.3f} s", flush=True)


def speculation(name: str, large: LanguageModel, small: LanguageModel, tokens: int) -> None:
    """Tokens per second with and without a draft, in turn."""
    prompt = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    speeds: dict[str, list[float]] = {"plain": [], "draft": []}
    for _ in range(3):
        for way in speeds:
            state = prefill(large, prompt)
            decoding: Session | Speculation = Session(large, state)
            if way == "draft":
                decoding = Speculation(large, state, small, prefill(small, prompt))
            begin = time.perf_counter()
            for _ in range(tokens):
                decoding.step()
            speeds[way].append(tokens / (time.perf_counter() - begin))
    plain, draft = (sorted(found)[1] for found in speeds.values())
    assert isinstance(decoding, Speculation)
    share = decoding.accepted / decoding.proposed
    print(f"{name}: plain {plain:.0f} tokens/s, with a draft {draft:.0f}, {share:.0%} accepted")


def pair(width: int, layers: int, follows: bool) -> tuple[LanguageModel, LanguageModel]:
    """A large model and a draft; if it follows, the large one's later blocks change nothing."""
    torch.manual_seed(0)
    large = LanguageModel(ModelConfig(f"h3*{layers}", vocab_size=256, d_model=width)).eval()
    small = LanguageModel(ModelConfig("h3", vocab_size=256, d_model=width)).eval()
    if follows:
        with torch.no_grad():
            for link in large.stack.links[2:]:
                for name, weight in link.named_parameters():
                    if "out_proj" in name or "down" in name:
                        weight.zero_()
        shared = {k: v for k, v in large.state_dict().items() if k in small.state_dict()}
        small.load_state_dict(shared)
    return large, small


async def ask(url: str, pid: int, clients: int, tokens: int, length: int) -> None:
    """Both measurements of the server."""
    client = AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)
    await load(client, pid, clients, tokens)
    await conversation(client, length)
    await client.close()


def main(pattern: str, width: int, clients: int, tokens: int, length: int) -> None:
    """Serve a model in a process of its own, and measure it."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = LanguageModel(ModelConfig(pattern, vocab_size=256, d_model=width))
        save_model(model, Path(folder) / "model")
        command = [sys.executable, "-m", "stateline", "serve", f"{folder}/model", "--port", "0"]
        command += ["--max_rows", str(clients), "--device", "cpu"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split(" at ")[1].strip()
                asyncio.run(ask(url, server.pid, clients, tokens, length))
            finally:
                server.terminate()
    speculation("a draft that is right", *pair(4 * width, 8, follows=True), tokens)
    speculation("a draft that is wrong", *pair(4 * width, 2, follows=False), tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pattern", default="h3*2")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=50_000)
    main(**vars(parser.parse_args()))
