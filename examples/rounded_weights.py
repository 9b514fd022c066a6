"""What weights of 8 bits cost and gain: bytes, tokens per second, and the loss on a text.

Run it: python examples/rounded_weights.py MODEL TEXT

MODEL is a folder of a trained or published language model. Its weights in float32, in bfloat16 and
rounded to int8 take turns in decoding, on one thread and in processor time. The loss is that of the
first tokens of the file TEXT, in windows.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stateline
from stateline.generate import Session, prefill

KINDS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "weights": "int8"},
}


def megabytes(model: stateline.Model) -> float:
    """Size of all weights."""
    tensors = {x.data_ptr(): x.nbytes for x in model.module.state_dict().values()}
    return sum(tensors.values()) / 1e6


@torch.inference_mode()
def loss(model: stateline.Model, tokens: torch.Tensor) -> float:
    """Nats per token of rows of tokens."""
    parts = []
    for row in tokens:
        logits = model.module(row[None])[0, :-1].double()
        parts.append(F.cross_entropy(logits, row[1:]).item())
    return statistics.mean(parts)


def speed(model: stateline.Model, prompt: torch.Tensor, tokens: int) -> float:
    """Tokens per second after a prompt, whether or not one of them ends the text."""
    session = Session(model.module, prefill(model.module, prompt[None]))
    session.step()
    started = time.process_time()
    for _ in range(tokens):
        session.step()
    return tokens / (time.process_time() - started)


def arguments() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def main(given: argparse.Namespace) -> None:
    """Print a line for each kind of weights."""
    torch.set_num_threads(1)
    models = {kind: stateline.load(given.model, **how) for kind, how in KINDS.items()}
    text = given.text.read_text(encoding="utf-8")
    tokens = torch.from_numpy(models["int8"].tokenizer.prompt(text)).long()
    rows = tokens[: given.window * given.windows].view(-1, given.window)
    rates = [
        {kind: speed(model, tokens[:32], given.tokens) for kind, model in models.items()}
        for _ in range(1 + given.rounds)
    ][1:]
    for kind, model in models.items():
        found = [rate[kind] for rate in rates]
        print(
            f"{kind:9} {megabytes(model):6.0f} MB, {min(found):.1f} to {max(found):.1f} tokens/s, "
            f"{loss(model, rows):.4f} nats per token"
        )


if __name__ == "__main__":
    main(arguments().parse_args())
