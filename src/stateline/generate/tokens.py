"""From prompts to the tokens that follow, for batches that end together."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.sampling import GREEDY, Sampling
from stateline.generate.session import ROOM, Choice, Prompt, Session, begin
from stateline.models.language_model import LanguageModel


def stream(
    model: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Iterator[Choice]:
    """Yield the tokens after a prompt, one per row at a time, as soon as they are known.

    Args:
        model: A language model in evaluation mode.
        prompt: At least one token per row: a batch, or a sequence of rows of any lengths.
        max_new_tokens: How many tokens to yield.
        sampling: How they are chosen; greedy by default.
        seed: Of the random choice; the same seed gives the same tokens on the same machine.

    Raises:
        InputError: If the prompt is empty, has a token outside the vocabulary, or is too long for
            a model with learned positions.
    """
    check_length(model, max(map(len, prompt), default=0), max_new_tokens)
    room = max(1, min(max_new_tokens, ROOM))
    session = Session(model, begin(model, prompt, seed=seed), sampling=sampling, room=room)
    for _ in range(max_new_tokens):
        yield session.step()


def generate(
    model: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Int[Tensor, "batch new"]:
    """The tokens after a prompt, all at once; arguments as for :func:`stream`.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> generate(model, torch.tensor([[1, 2, 3]]), 4).shape
        torch.Size([1, 4])
        >>> generate(model, [torch.tensor([1, 2, 3]), torch.tensor([4])], 2).shape
        torch.Size([2, 2])
    """
    choices = stream(model, prompt, max_new_tokens, sampling=sampling, seed=seed)
    tokens = [choice.tokens for choice in choices]
    return torch.stack(tokens, dim=1) if tokens else torch.zeros(len(prompt), 0, dtype=torch.int64)


def check_length(model: LanguageModel, length: int, max_new_tokens: int) -> None:
    """Raise InputError if so many tokens cannot follow a text of ``length`` tokens."""
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    limit, wanted = model.max_len, length + max_new_tokens - 1
    if limit is not None and wanted > limit:
        raise InputError(
            f"prompt and new tokens make {wanted} positions, but the model was made for "
            f"max_len={limit} tokens: shorten either"
        )
