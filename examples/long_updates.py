"""Measure the memory and the processor time of one update on long sequences.

Run it: python examples/long_updates.py "state_passing(h3*4, chunk_len=8192)" --lengths 16384 65536
or:     python examples/long_updates.py "attention(n_heads=1)" --lengths 65536

A language model (width 64, 256 letters) with activation checkpointing reads one row of random
tokens on one thread, and computes the gradients of a loss that has the logits of 8,192 positions in
memory. The memory is the growth of the resident set. It holds also what the C library keeps in
holes between blocks; with ``MALLOC_MMAP_THRESHOLD_=131072`` large blocks go back to the system,
which costs time.
"""

import argparse
import time

import torch

from stateline import LanguageModel, ModelConfig
from stateline.allocator import keep_freed_memory
from stateline.bench.memory import peak_bytes
from stateline.layers.compose import checkpoint_activations
from stateline.models.likelihood import token_losses
from stateline.train.chunked_loss import chunked

POSITIONS = 8192
"""Positions whose logits are in memory at once, and length of the update that is not counted."""


def gradients(model: LanguageModel, length: int) -> None:
    """Compute the gradients of the loss on a row of random tokens."""
    tokens = torch.randint(256, (1, length + 1))
    loss = chunked(lambda z, t: token_losses(z, t).sum(), POSITIONS, tokens[:, 1:].contiguous())
    model(tokens[:, :-1], reduce=loss).backward()


def main(given: argparse.Namespace) -> None:
    """Print a line for each length."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model = LanguageModel(ModelConfig(given.pattern, vocab_size=256, d_model=64))
    checkpoint_activations(model.stack, True)
    gradients(model, min(POSITIONS, *given.lengths))
    for length in given.lengths:
        started = time.process_time()
        grown = (peak_bytes(lambda n=length: gradients(model, n)) or 0) / 2**20
        seconds = time.process_time() - started
        print(f"{length:,} positions: {grown:.0f} MiB, {seconds:.1f} s", flush=True)


def arguments() -> argparse.ArgumentParser:
    """Declare the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
