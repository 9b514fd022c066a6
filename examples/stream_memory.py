"""Measure memory while a model reads and decodes a long text.

Run it: python examples/stream_memory.py

An H3 model with random weights, or the model of ``--run FOLDER``, reads a million random tokens and
then decodes. Resident memory is printed ten times in each phase. It stays constant if the state has
a constant size.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stateline import LanguageModel, ModelConfig, load_model, nbytes
from stateline.generate import Sampling, Session, prefill_chunks

PIECE = 1000
POINTS = 10


def main(model: LanguageModel, tokens: int, steps: int) -> None:
    """Read, then decode, and print the memory ten times in each phase."""
    print(f"{model.config.pattern}, width {model.config.d_model}: {tokens:,} tokens to read")
    state = prefill_chunks(model, reported(random_text(model.config.vocab_size, tokens), tokens))
    print(f"the state has {nbytes(state.model):,} bytes; {steps:,} tokens to write")
    session = Session(model, state, sampling=Sampling(temperature=1.0))
    for _ in reported((session.step().tokens for _ in range(steps)), steps):
        pass
    print(f"the state has {nbytes(session.state().model):,} bytes")


def random_text(vocab_size: int, tokens: int) -> Iterator[Tensor]:
    """Random tokens in chunks, none of which is kept."""
    random = torch.Generator().manual_seed(0)
    for start in range(0, tokens, PIECE):
        yield torch.randint(vocab_size, (min(PIECE, tokens - start),), generator=random)


def reported(pieces: Iterator[Tensor], total: int) -> Iterator[Tensor]:
    """Yield the same chunks, and print the memory ten times on the way."""
    start, done, told = time.perf_counter(), 0, 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if done * POINTS >= (told + 1) * total:
            told = done * POINTS // total
            seconds = time.perf_counter() - start
            print(f"{done:>12,} tokens  {resident_mib():7.1f} MiB  {seconds:7.1f} s", flush=True)


def resident_mib() -> float:
    """Resident memory of this process in MiB (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure memory while a model reads and decodes.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--run", default=None)
    given = parser.parse_args()
    torch.manual_seed(0)
    small = ModelConfig("h3*2", vocab_size=256, d_model=64)
    model = LanguageModel(small).eval() if given.run is None else load_model(given.run)
    main(model, given.tokens, given.steps)
