"""Memory while a model reads and writes a long text: constant where its state is.

Run it: python examples/stream_memory.py

A million random tokens go through an H3 model of random weights, or of a run given with
``--run FOLDER``; then the model writes. Resident memory is printed at ten points of each.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stateline import LanguageModel, ModelConfig, load_model, nbytes
from stateline.generate import Sampling, Session, read_pieces

PIECE = 1000
POINTS = 10


def main(model: LanguageModel, tokens: int, steps: int) -> None:
    """Read, then write, and tell the memory on the way."""
    print(f"{model.config.pattern}, width {model.config.d_model}: {tokens:,} tokens to read")
    state = read_pieces(model, reported(random_text(model.config.vocab_size, tokens), tokens))
    print(f"the state has {nbytes(state.model):,} bytes; {steps:,} tokens to write")
    session = Session(model, state, sampling=Sampling(temperature=1.0))
    for _ in reported((session.step().tokens for _ in range(steps)), steps):
        pass
    print(f"the state has {nbytes(session.state().model):,} bytes")


def random_text(vocab_size: int, tokens: int) -> Iterator[Tensor]:
    """Tokens in pieces, none of which is kept."""
    random = torch.Generator().manual_seed(0)
    for start in range(0, tokens, PIECE):
        yield torch.randint(vocab_size, (min(PIECE, tokens - start),), generator=random)


def reported(pieces: Iterator[Tensor], total: int) -> Iterator[Tensor]:
    """The same pieces; ten times on the way, when a piece has been used, a line about memory."""
    start, done, told = time.perf_counter(), 0, 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if done * POINTS >= (told + 1) * total:
            told = done * POINTS // total
            seconds = time.perf_counter() - start
            print(f"{done:>12,} tokens  {resident_mib():7.1f} MiB  {seconds:7.1f} s", flush=True)


def resident_mib() -> float:
    """Memory of this process that is in RAM (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory while a model reads and writes.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--run", default=None)
    given = parser.parse_args()
    torch.manual_seed(0)
    small = ModelConfig("h3*2", vocab_size=256, d_model=64)
    model = LanguageModel(small).eval() if given.run is None else load_model(given.run)
    main(model, given.tokens, given.steps)
