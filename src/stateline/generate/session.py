"""Decoding: a prompt is read, then one step follows the other on a state that changes in place."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate.sampling import GREEDY, Sampling, choose, uniform
from stateline.layers import cat_states, select_rows
from stateline.layers.derived import Memory, remembering
from stateline.layers.state import trim
from stateline.models.language_model import LanguageModel, LanguageModelState

PREFILL_CHUNK = 1024
"""Prompt tokens whose logits are in memory at a time."""

ROOM = 256
"""Steps for which room is made in the state at a time: the end of a text is not known before."""

Prompt = Int[Tensor, "batch length"] | Sequence[Int[Tensor, "_"]]


class SessionState(NamedTuple):
    """All that the rest of a batch of texts depends on, but the model and the sampling.

    The last token of each row is known and not yet fed, so that there is one way on from a prompt,
    from a chosen token and from a kept state. The random numbers of a row are given by its seed,
    its number and the count of numbers drawn; ``seen`` is for the repetition penalty.
    """

    model: LanguageModelState
    token: Int[Tensor, " batch"]
    random: Int[Tensor, "batch 3"]
    seen: Bool[Tensor, "batch vocab"]

    @property
    def length(self) -> int:
        """Tokens of the longest row, with the one not yet fed."""
        return int(self.model.position.max()) + 1


class Choice(NamedTuple):
    """The next token of each row, and the logits that it was chosen from."""

    tokens: Int[Tensor, " batch"]
    logits: Float[Tensor, "batch vocab"]

    @property
    def log_probs(self) -> Float[Tensor, " batch"]:
        """What the model gave the tokens, whatever the sampling: natural logarithms.

        Example:
            >>> Choice(torch.tensor([1]), torch.tensor([[0.0, 0.0]])).log_probs
            tensor([-0.6931])
        """
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        return logits.log_softmax(dim=-1).gather(1, self.tokens[:, None])[:, 0]


class Session:
    """A model that goes on with a batch of texts, step by step.

    Memory grows with the model's state alone, which the steps change in place; the state that the
    session starts from stays as it is. The model's weights must not change meanwhile.

    Args:
        model: A language model in evaluation mode.
        state: What :func:`begin` or :func:`read` returned, or a kept state.
        sampling: How tokens are chosen.
        room: Steps for which room is made in a growing state at a time.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> session = Session(model, begin(model, torch.tensor([[1, 2, 3]])))
        >>> session.step().tokens.shape, session.state().length
        (torch.Size([1]), 4)
    """

    def __init__(
        self,
        model: LanguageModel,
        state: SessionState,
        *,
        sampling: Sampling = GREEDY,
        room: int = ROOM,
    ) -> None:
        self.model, self.sampling = model, sampling
        self._state, self._room, self._free = state, room, 0
        self._memory: Memory = {}

    @torch.inference_mode()
    def step(self) -> Choice:
        """Feed the last token of each row, and choose the next."""
        if self._free == 0:
            self._state = self._state._replace(model=self._roomy(self._state.model))
            self._free = self._room
        state, drawn = self._state, self.sampling.temperature > 0
        with remembering(self._memory):
            logits = self.model.step_(state.token, state.model)
        if logits.isnan().any():
            raise InputError(
                f"the model gives NaN after {self._state.length - 1} tokens: its numbers grow too "
                "large; take an older checkpoint, or begin without the kept state"
            )
        numbers = uniform(state.random) if drawn else None
        tokens = choose(logits, self.sampling, numbers, state.seen)
        count = torch.tensor([0, 0, int(drawn)], device=tokens.device)
        seen = state.seen.scatter(1, tokens[:, None], True)
        self._state = SessionState(state.model, tokens, state.random + count, seen)
        self._free -= 1
        return Choice(tokens, logits)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows alone, in the given order."""
        self._state = select_rows(self._state, rows)

    @torch.inference_mode()
    def state(self) -> SessionState:
        """A copy of the state without free room: a value to keep, to fork, to save."""
        return pytree.tree_map(torch.clone, trim(self._state))

    def _roomy(self, state: LanguageModelState) -> LanguageModelState:
        """A copy with room: joined with a state that has it, every row gets it."""
        longest = int(state.position.max())
        empty = self.model.init_state(1, capacity=longest + self._room)
        return select_rows(cat_states([state, empty]), range(len(state.position)))


@torch.inference_mode()
def begin(model: LanguageModel, prompt: Prompt, *, seed: int = 0) -> SessionState:
    """Read the beginning of a batch of texts, each from its first token.

    Prompts of one length are read together, and no row depends on any other.

    Args:
        model: A language model in evaluation mode.
        prompt: At least one token per row: a batch, or a sequence of rows of any lengths.
        seed: Of the random choices; row ``i`` draws the same numbers in any batch.

    Returns:
        The state after the prompts, whose last tokens are not yet fed.

    Raises:
        InputError: If a prompt is empty, has a token outside the vocabulary, or is too long for
            a model with learned positions, or if the seed is negative.
    """
    if not len(prompt) or any(row.numel() == 0 for row in prompt):
        raise InputError("the prompt is empty: give at least one token")
    rows_by_length: dict[int, list[int]] = defaultdict(list)
    for row, tokens in enumerate(prompt):
        model.check_tokens(tokens)
        rows_by_length[len(tokens)].append(row)
    parts = []
    for rows in rows_by_length.values():
        tokens = torch.stack([prompt[row].long() for row in rows])
        parts.append(read(model, _first(model, tokens[:, 0]), tokens[:, 1:]))
    order = torch.tensor([row for rows in rows_by_length.values() for row in rows])
    return seeded(select_rows(cat_states(parts), order.argsort()), seed)


@torch.inference_mode()
def read(
    model: LanguageModel, state: SessionState, tokens: Int[Tensor, "batch length"]
) -> SessionState:
    """The state after more tokens that are given, not chosen; there may be none.

    Raises:
        InputError: If a token is outside the vocabulary, or learned positions end before.
    """
    if tokens.shape[1] == 0:
        return state
    model.check_tokens(tokens)
    after = state.model
    fed = torch.cat([state.token[:, None], tokens[:, :-1]], dim=1)
    for piece in fed.split(PREFILL_CHUNK, dim=1):
        after = model.forward_chunk(piece, after)[1]
    return SessionState(after, tokens[:, -1], state.random, state.seen.scatter(1, tokens, True))


def seeded(state: SessionState, seed: int) -> SessionState:
    """The same state with new random numbers, those of ``seed`` from the first on.

    Raises:
        InputError: If the seed is negative, or has more than 63 bits.
    """
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    random = [[seed, row, 0] for row in range(len(state.token))]
    return state._replace(random=torch.tensor(random, device=state.token.device))


def blank(model: LanguageModel, capacity: int = 0) -> SessionState:
    """A state of one row without meaning: what a kept state must look like."""
    token = torch.zeros(1, dtype=torch.int64, device=model.embedding.weight.device)
    return _first(model, token)._replace(model=model.init_state(1, capacity=capacity))


def _first(model: LanguageModel, token: Int[Tensor, " batch"]) -> SessionState:
    """The state of texts of one token, without a seed."""
    rows = len(token)
    seen = torch.zeros(rows, model.config.vocab_size, dtype=torch.bool, device=token.device)
    random = torch.zeros(rows, 3, dtype=torch.int64, device=token.device)
    return SessionState(
        model.init_state(rows), token, random, seen.scatter(1, token[:, None], True)
    )
