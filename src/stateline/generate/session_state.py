"""The state of a batch of texts, and prefill: reading texts into it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from stateline.errors import InputError
from stateline.layers import cat_states, select_rows
from stateline.models.inputs import check_length
from stateline.models.language_model import LanguageModel, LanguageModelState
from stateline.settings import check_kind, check_unwrapped

PREFILL_CHUNK = 1024
"""Prompt tokens that are read at a time, whose activations are in memory together."""

StateT = TypeVar("StateT", bound=Any)

Prompt = Int[Tensor, "batch length"] | Sequence[Int[Tensor, "_"]]


class SessionState(NamedTuple):
    """All that the continuation of a batch depends on, except the model and the sampling.

    The last token of each row is known but not yet fed to the model, so that decoding continues in
    the same way after a prompt, after a sampled token and from a kept state.

    Attributes:
        model: State of the model after all tokens but the last.
        token: The last token of each row.
        random: Seed, row number and count of random numbers drawn, for each row.
        seen: Tokens that occur in each row, for the repetition penalty.
    """

    model: LanguageModelState
    token: Int[Tensor, " batch"]
    random: Int[Tensor, "batch 3"]
    seen: Bool[Tensor, "batch vocab"]

    @property
    def length(self) -> int:
        """Tokens of the longest row, including the one not yet fed."""
        return int(self.model.position.max()) + 1


@torch.inference_mode()
def prefill(model: LanguageModel, prompt: Prompt, *, seed: int = 0) -> SessionState:
    """Read the prompts of a batch of texts.

    Prompts of one length are read together, and no row depends on any other.

    Args:
        model: A language model in evaluation mode.
        prompt: At least one token per row: a batch, or a sequence of rows of any lengths. It is
            moved to the model's device.
        seed: Seed of the random choices; row ``i`` draws the same numbers in any batch.

    Returns:
        The state after the prompts, whose last tokens are not yet fed.

    Raises:
        InputError: If a prompt is empty or has another shape, has a token outside the vocabulary,
            or is too long for a model with learned positions, or if the seed is out of range.
    """
    parts, order = [], []
    for rows, tokens in _by_length(model, prompt):
        parts.append(extend(model, first_token(model, tokens[:, 0]), tokens[:, 1:]))
        order += rows
    return seeded(_in_order(parts, order), seed)


@torch.inference_mode()
def prefill_whole(
    model: LanguageModel, prompt: Prompt, *, seed: int = 0
) -> tuple[SessionState, Float[Tensor, "batch vocab"]]:
    """Read the prompts of a batch of texts with their last tokens; arguments as of :func:`prefill`.

    Returns:
        The state, in which the last token of each row is fed already, and the logits after it.
    """
    parts, order = [], []
    for rows, tokens in _by_length(model, prompt):
        check_length(model.max_len, tokens.shape[1])
        state = first_token(model, tokens[:, -1])
        after, logits = _feed(model, state.model, tokens, keep=1)
        seen = state.seen.scatter_(1, tokens, True)
        parts.append((state._replace(model=after, seen=seen), logits[:, 0]))
        order += rows
    state, logits = _in_order(parts, order)
    return seeded(state, seed), logits


def _by_length(model: LanguageModel, prompt: Prompt) -> Iterator[tuple[list[int], Tensor]]:
    """The numbers of the rows of each length, and their tokens, after a check of all rows."""
    check_model(model)
    rows_by_length: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(prompt_lengths(prompt)):
        model.check_tokens(prompt[row])
        rows_by_length[length].append(row)
    for rows in rows_by_length.values():
        yield rows, torch.stack([prompt[row].long() for row in rows]).to(model.device)


def _in_order(parts: Sequence[StateT], rows: Sequence[int]) -> StateT:
    """The parts of a batch together, row ``rows[i]`` of the batch from the ``i``-th."""
    if len(parts) == 1:  # the rows are in order, and a state is not copied
        return parts[0]
    places = torch.tensor(rows, device="cpu").argsort()
    batch: StateT = select_rows(cat_states(parts), places)
    return batch


def prompt_lengths(prompt: Prompt) -> list[int]:
    """Tokens of each row of a prompt, after a check that there are some."""
    parts, axes = ([prompt], 2) if isinstance(prompt, Tensor) else (prompt, 1)
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim != axes:
            tensor = isinstance(part, Tensor)
            got = f"a tensor of shape {tuple(part.shape)}" if tensor else f"a {type(part).__name__}"
            raise InputError(
                "a prompt must be a tensor of shape (batch, length), or a list of tensors of shape "
                f"(length,), got {got}{'' if axes == 2 else ' in a list'}: give such as "
                "torch.tensor([[1, 2, 3]])"
            )
    lengths = [len(row) for row in prompt]
    if 0 in lengths or not lengths:
        raise InputError("the prompt is empty: give at least one token")
    return lengths


@torch.inference_mode()
def extend(
    model: LanguageModel, state: SessionState, tokens: Int[Tensor, "batch length"]
) -> SessionState:
    """The state after further given tokens; there may be none.

    Raises:
        InputError: If the tokens have another number of rows than the state, a token is outside
            the vocabulary, or there are more positions than the model has learned.
    """
    check_model(model)
    rows = len(state.token)
    if tokens.ndim != 2 or len(tokens) != rows:
        raise InputError(
            f"tokens must have the shape (rows, length) with the {rows} rows of the state, got "
            f"{tuple(tokens.shape)}: fork a state by select_rows to read several texts after it"
        )
    if tokens.shape[1] == 0:
        return state
    model.check_tokens(tokens)
    if model.max_len is not None:  # on a GPU, the calls of the model do not check this
        check_length(model.max_len, state.length - 1 + tokens.shape[1])
    tokens = tokens.to(state.token.device)
    fed = torch.cat([state.token[:, None], tokens[:, :-1]], dim=1)
    after, _ = _feed(model, state.model, fed, keep=0)
    last = tokens[:, -1].clone()  # a view would hold all tokens as long as the state
    return SessionState(after, last, state.random, state.seen.scatter(1, tokens, True))


def _feed(
    model: LanguageModel,
    state: LanguageModelState,
    tokens: Int[Tensor, "batch length"],
    *,
    keep: int,
) -> tuple[LanguageModelState, Float[Tensor, "batch keep vocab"]]:
    """The state after tokens, which are read in chunks, and the logits after the last ``keep``."""
    *chunks, last = tokens.split(PREFILL_CHUNK, dim=1)
    for chunk in chunks:
        state = model.forward_chunk(chunk, state, keep=0)[1]
    logits, state = model.forward_chunk(last, state, keep=keep)
    return state, logits


def seeded(state: SessionState, seed: int) -> SessionState:
    """The same state with another seed; the next random number is the first of ``seed``.

    Raises:
        InputError: If the seed is negative, or has more than 63 bits.
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    random = [[seed, row, 0] for row in range(len(state.token))]
    return state._replace(random=torch.tensor(random, device=state.token.device))


def template(model: LanguageModel, capacity: int = 0) -> SessionState:
    """A state of one row with the structure, dtypes and shapes of any state of the model."""
    token = torch.zeros(1, dtype=torch.int64, device=model.device)
    return first_token(model, token)._replace(model=model.init_state(1, capacity=capacity))


def check_model(model: nn.Module) -> None:
    """Raise InputError unless it is a model; one that ``torch.compile`` made is, too."""
    check_kind("model", model, nn.Module, "LanguageModel(ModelConfig('h3', vocab_size=256))")
    check_unwrapped("model", model)


def first_token(model: LanguageModel, token: Int[Tensor, " batch"]) -> SessionState:
    """The state of texts of one token, without a seed."""
    token = token.to(model.device, copy=True)  # a view would hold all tokens of a text
    rows = len(token)
    seen = torch.zeros(rows, model.config.vocab_size, dtype=torch.bool, device=token.device)
    random = torch.zeros(rows, 3, dtype=torch.int64, device=token.device)
    return SessionState(
        model.init_state(rows), token, random, seen.scatter(1, token[:, None], True)
    )


class OutputIsNaN(InputError):
    """The numbers of a model have grown too large."""


def output_is_nan(length: int) -> InputError:
    """The error of a model that gives NaN after this number of tokens."""
    return OutputIsNaN(
        f"the model gives NaN after {length} tokens: its numbers grow too large; take an older "
        "checkpoint, or begin without the kept state"
    )
