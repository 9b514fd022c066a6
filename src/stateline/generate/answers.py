"""Answers to a batch of prompts: greedy texts, each with its own end."""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from stateline.data import Tokenizer
from stateline.data.tokenizer import utf8
from stateline.generate.session import Session
from stateline.generate.text import TextStream
from stateline.models.language_model import LanguageModel


def answer(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    stop: Sequence[str] = (),
    end: Collection[int] = (),
    least: int = 0,
) -> list[str]:
    """Greedy continuations of prompts; the other prompts of the batch do not change a text.

    A text ends before a stop string, before an end token, given or of the tokenizer, or
    at its limit; its row then leaves the batch.

    Args:
        model: A language model in evaluation mode.
        tokenizer: Its tokenizer.
        prompts: Tokens of each prompt, at least one.
        limits: Largest number of new tokens for each prompt.
        stop: Strings before which a text ends.
        end: Tokens before which a text ends.
        least: Number of tokens among which no end token is chosen.

    Returns:
        The new texts; bytes that are not a character become U+FFFD.

    Raises:
        InputError: If a prompt cannot be read, or the model gives NaN.

    Example:
        >>> from stateline.data import ByteTokenizer
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=256, d_model=8)).eval()
        >>> [len(text) <= 3 for text in answer(model, ByteTokenizer(), [[65], [66, 67]], [3, 3])]
        [True, True]
    """
    rows_of_tokens = [torch.tensor(prompt, dtype=torch.int64, device="cpu") for prompt in prompts]
    session = Session.after(model, rows_of_tokens, room=max(1, *limits))
    ends = torch.tensor(sorted(end), dtype=torch.int64, device=model.device)
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    texts, rows = [""] * len(prompts), list(range(len(prompts)))
    for count in range(1, max(limits) + 1):
        adjust = partial(_without, ends) if count <= least else None
        tokens = session.step(adjust=adjust).tokens
        active = []
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if token in end or count > limits[row]:
                continue
            texts[row] += streams[row].push(token)
            if not streams[row].stopped and count < limits[row]:
                active.append(place)
        if not active:
            break
        if len(active) < len(rows):
            session.select(active)
            rows = [rows[place] for place in active]
    session.check()
    whole = [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]
    return [utf8(text).decode(errors="replace") for text in whole]


def _without(tokens: Tensor, logits: Tensor) -> Tensor:
    """The logits of all other tokens."""
    return logits.index_fill(1, tokens, -torch.inf)
