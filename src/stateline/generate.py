"""Generation: prefill, then one step after the other on a state that changes in place."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.models.language_model import LanguageModel

PREFILL_CHUNK = 1024
"""Prompt tokens whose logits are in memory at a time."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Only so many of the most likely tokens are considered.
        top_p: Only the most likely tokens are considered that together reach this probability.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InputError(f"temperature must not be negative, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")


GREEDY = Sampling()


@torch.inference_mode()
def stream(
    model: LanguageModel,
    prompt: Int[Tensor, "batch length"],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Iterator[Int[Tensor, " batch"]]:
    """Yield the tokens after a prompt, one per row at a time, as soon as they are known.

    Args:
        model: A language model in evaluation mode.
        prompt: At least one token per row; all rows are of one length.
        max_new_tokens: How many tokens to yield.
        sampling: How they are chosen; greedy by default.
        seed: Of the random choice; the same seed gives the same tokens on the same machine.

    Raises:
        InputError: If the prompt is empty, has a token outside the vocabulary, or is too long for
            a model with learned positions.
    """
    _check_prompt(model, prompt, max_new_tokens)
    if max_new_tokens == 0:
        return
    random = torch.Generator(prompt.device).manual_seed(seed)
    state = model.init_state(prompt.shape[0], capacity=max_new_tokens)
    for piece in prompt.split(PREFILL_CHUNK, dim=1):
        logits, state = model.forward_chunk(piece, state)
    token = choose(logits[:, -1], sampling, random)
    yield token
    for _ in range(max_new_tokens - 1):
        token = choose(model.step_(token, state), sampling, random)
        yield token


def generate(
    model: LanguageModel,
    prompt: Int[Tensor, "batch length"],
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
    """
    tokens = list(stream(model, prompt, max_new_tokens, sampling=sampling, seed=seed))
    return torch.stack(tokens, dim=1) if tokens else prompt[:, :0]


def choose(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling, random: torch.Generator
) -> Int[Tensor, " batch"]:
    """Draw one token per row.

    Example:
        >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY, torch.Generator())
        tensor([1])
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() - logits.amax(dim=-1, keepdim=True)  # so that no quotient overflows
    ordered, tokens = (logits / sampling.temperature).sort(dim=-1, descending=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = float("-inf")
    probabilities = ordered.softmax(dim=-1)
    if sampling.top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities  # the likeliest token always stays
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    place = torch.multinomial(probabilities, 1, generator=random)
    return tokens.gather(1, place)[:, 0]


def _check_prompt(model: LanguageModel, prompt: Tensor, max_new_tokens: int) -> None:
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    if prompt.numel() == 0:
        raise InputError("the prompt is empty: give at least one token")
    model.check_tokens(prompt)
    limit, wanted = model.config.max_len, prompt.shape[1] + max_new_tokens - 1
    if limit is not None and wanted > limit:
        raise InputError(
            f"prompt and new tokens make {wanted} positions, but the model has learned positions "
            f"for max_len={limit} tokens: shorten either"
        )
