"""Answers to a batch of prompts: greedy texts, each of which ends by itself."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.data.tokenizer import utf8
from stateline.generate.session import Choice, Session, prefill
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
    never_empty: bool = False,
) -> list[str]:
    """The most likely continuations of prompts, each as it would be alone.

    A text ends before a stop string, before an end token, or at its limit; its row then leaves the
    batch.

    Args:
        model: A language model in evaluation mode.
        tokenizer: Its tokenizer.
        prompts: Tokens of each prompt, at least one.
        limits: Largest number of new tokens of each, as many limits as prompts.
        stop: Strings before which a text ends.
        end: Tokens before which a text ends.
        never_empty: Whether an end token may not be the first; then the best other token is.

    Returns:
        The new texts; bytes that are no character become U+FFFD.

    Raises:
        InputError: If a prompt cannot be read, or the model gives NaN.

    Example:
        >>> from stateline.data import ByteTokenizer
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=256, d_model=8)).eval()
        >>> [len(text) <= 3 for text in answer(model, ByteTokenizer(), [[65], [66, 67]], [3, 3])]
        [True, True]
    """
    rows_of_tokens = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    session = Session(model, prefill(model, rows_of_tokens), room=max(1, *limits))
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    texts, rows = [""] * len(prompts), list(range(len(prompts)))
    for count in range(1, max(limits) + 1):
        choice = session.step()
        tokens = choice.tokens
        if count == 1 and never_empty:
            tokens = _best_other(choice, end)
            session = Session(model, session.state()._replace(token=tokens), room=max(1, *limits))
        going = []
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if token in end or count > limits[row]:
                continue
            texts[row] += streams[row].push(token)
            if not streams[row].stopped and count < limits[row]:
                going.append(place)
        if not going:
            break
        if len(going) < len(rows):
            session.select(going)
            rows = [rows[place] for place in going]
    session.check()
    whole = [text + stream.finish() for text, stream in zip(texts, streams, strict=True)]
    return [utf8(text).decode(errors="replace") for text in whole]


def _best_other(choice: Choice, end: Collection[int]) -> Int[Tensor, " batch"]:
    """The best token of each row that is no end token."""
    ends = torch.tensor(sorted(end), dtype=torch.int64, device=choice.logits.device)
    return choice.logits.index_fill(1, ends, -torch.inf).argmax(dim=1)
