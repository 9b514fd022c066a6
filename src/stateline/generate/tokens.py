"""From prompts to a fixed number of tokens that follow."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.prefixes import PrefixStates
from stateline.generate.sampling import GREEDY, Sampling
from stateline.generate.session import ROOM, Choice, Session
from stateline.generate.session_state import (
    Prompt,
    check_model,
    prompt_lengths,
    seeded,
)
from stateline.layers import cat_states
from stateline.models.inputs import warn_beyond_training
from stateline.models.language_model import LanguageModel


def stream(
    model: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    prefixes: PrefixStates | None = None,
) -> Iterator[Choice]:
    """Yield the tokens after a prompt step by step, one per row.

    On a GPU a step does not wait for its result; reading the tokens does.

    Args:
        model: A language model in evaluation mode.
        prompt: At least one token per row: a batch, or a sequence of rows of any lengths.
        max_new_tokens: Number of steps.
        sampling: How tokens are chosen; greedy by default.
        seed: Seed of the random choices; it gives the same tokens again on the same machine.
        prefixes: Kept states of the model. Prompts continue from them, and the states after the
            prompts and after the last tokens are kept.

    Raises:
        InputError: If the prompt is empty, has a token outside the vocabulary, or is too long for
            a model with learned positions; if the model gives NaN.
    """
    check_model(model)
    check_length(model, max(prompt_lengths(prompt)), max_new_tokens)
    room = max(1, min(max_new_tokens, ROOM))
    if prefixes is None:
        session = Session.after(model, prompt, seed=seed, sampling=sampling, room=room)
    else:
        read = [prefixes.read(row) for row in prompt]
        state, keys = seeded(cat_states([row.state for row in read]), seed), [r.key for r in read]
        session = Session(model, state, sampling=sampling, room=room)
    for _ in range(max_new_tokens):
        choice = session.step()
        if prefixes is not None:
            new = zip(choice.tokens.tolist(), keys, strict=True)
            keys = [key for token, before in new for key in prefixes.keys([token], before)]
        yield choice
    session.check()
    if prefixes is not None:
        for row, key in enumerate(keys):
            prefixes.keep(key, session.state([row]))


def generate(
    model: LanguageModel,
    prompt: Prompt,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    prefixes: PrefixStates | None = None,
) -> Int[Tensor, "batch new"]:
    """The tokens after a prompt, on the model's device; arguments as for :func:`stream`.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> generate(model, torch.tensor([[1, 2, 3]]), 4).shape
        torch.Size([1, 4])
        >>> generate(model, [torch.tensor([1, 2, 3]), torch.tensor([4])], 2).shape
        torch.Size([2, 2])
    """
    choices = stream(model, prompt, max_new_tokens, sampling=sampling, seed=seed, prefixes=prefixes)
    tokens = _tokens_of(choices)
    none = torch.zeros(len(prompt), 0, dtype=torch.int64, device=model.device)
    return torch.stack(tokens, dim=1) if tokens else none


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tokens_of(choices: Iterator[Choice]) -> list[Tensor]:
    """The tokens of all steps; ``torch.compile`` of generation leaves their loop alone."""
    return [choice.tokens for choice in choices]


def check_length(model: LanguageModel, length: int, max_new_tokens: int) -> None:
    """Raise InputError if ``max_new_tokens`` cannot follow a text of ``length`` tokens."""
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    limit, wanted = model.max_len, length + max_new_tokens - 1
    if limit is not None and wanted > limit:
        raise InputError(
            f"prompt and new tokens make {wanted} positions, but the model was made for "
            f"max_len={limit} tokens: shorten one of them"
        )
    warn_beyond_training(model.config, wanted)
