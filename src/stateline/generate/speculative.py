"""Speculative decoding: a draft proposes tokens, and one call of the model checks them all."""

from collections import deque

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.random import uniform
from stateline.generate.sampling import GREEDY, Sampling, pick, probabilities
from stateline.generate.session import Choice, Session
from stateline.generate.session_state import SessionState, extend, output_is_nan
from stateline.layers.decoder import Decoder
from stateline.models.language_model import LanguageModel, LanguageModelState

AHEAD = 4
"""Tokens that a draft proposes at a time, by default."""


class Speculation:
    r"""Decodes one text with the help of a draft, a model that is faster and often right.

    The draft proposes tokens :math:`d_1, \ldots, d_n` from its distributions :math:`q_i`. One chunk
    gives the model's distributions :math:`p_i`. In order, each :math:`d_i` is accepted with
    probability :math:`\min(1, p_i(d_i) / q_i(d_i))`. The first rejected token is replaced by a
    draw from :math:`\max(0, p_i - q_i)`, normalised; if all are accepted, one more token is drawn
    from :math:`p_{n+1}`. So each token has the model's own distribution, whatever the draft is. To
    go back, both models continue from the state that was kept before the proposal; therefore any
    model can be a draft for any other of the same vocabulary.

    Greedy decoding is the case of distributions with one token. It gives the tokens that
    :class:`Session` gives, unless the two likeliest tokens differ by less than the rounding
    between a chunk and steps. Sampling draws other numbers than ``Session`` does, from the same
    distribution.

    Args:
        model: A language model in evaluation mode.
        state: Result of :func:`prefill`, of one row.
        draft: Another language model.
        draft_state: The draft's state after the same tokens.
        sampling: How tokens are chosen.
        ahead: Tokens that the draft proposes at a time.

    Attributes:
        proposed: Number of tokens that the draft has proposed.
        accepted: Number of these that were accepted.
        rounds: Number of proposals, each checked by one call of the model.

    Raises:
        InputError: If the vocabularies or the lengths differ, or there are several rows.

    Example:
        >>> from stateline.generate import prefill
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> states = [prefill(model, torch.tensor([[1, 2, 3]])) for _ in range(2)]
        >>> decoding = Speculation(model, states[0], model, states[1], ahead=3)
        >>> tokens = [decoding.step().tokens.item() for _ in range(8)]
        >>> decoding.rounds, decoding.accepted
        (2, 6)

    References:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et
        al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: SessionState,
        draft: LanguageModel,
        draft_state: SessionState,
        *,
        sampling: Sampling = GREEDY,
        ahead: int = AHEAD,
    ) -> None:
        sizes = model.config.vocab_size, draft.config.vocab_size
        if sizes[0] != sizes[1]:
            raise InputError(
                f"a draft must have the vocabulary of the model, {sizes[0]} tokens, "
                f"got {sizes[1]}: give another draft"
            )
        rows, lengths = len(state.token), (state.length, draft_state.length)
        if rows != 1 or lengths[0] != lengths[1] or ahead < 1:
            raise InputError(
                "a draft needs one text, which both models have read, and proposes at least one "
                f"token, got {rows} texts, {lengths[0]} and {lengths[1]} tokens, ahead={ahead}"
            )
        self.model, self.draft, self.sampling, self.ahead = model, draft, sampling, ahead
        self.proposed = self.accepted = self.rounds = 0
        self._decoders = Decoder(model), Decoder(draft)
        self._kept = state
        # another row, so that no random number decides both a proposal and its acceptance
        random = state.random + torch.tensor([0, 2**32, 0], device=state.random.device)
        self._draft_kept = draft_state._replace(random=random)
        self._session = Session(draft, self._draft_kept, sampling=sampling)
        self._queue: deque[Choice] = deque()
        self._given: list[int] = []  # tokens after the kept state
        self._after: LanguageModelState | None = None  # the model's state if all were accepted
        self._random = state.random

    @torch.inference_mode()
    def step(self) -> Choice:
        """The next token, and the logits of the model.

        Raises:
            InputError: If logits are NaN, or a model with learned positions has no more of them.
        """
        if any(decoder.is_stale() for decoder in self._decoders):
            self.refresh()
        if not self._queue:
            self._keep_states()
            self._round()
        choice = self._queue.popleft()
        self._given.append(int(choice.tokens))
        return choice

    def refresh(self) -> None:
        """Go on with the weights that the models have now, as :meth:`Session.refresh`."""
        for decoder in self._decoders:
            decoder.refresh()
        self._session.refresh()
        self._queue.clear()
        self._after = None  # of the old weights

    def check(self) -> None:
        """Nothing to wait for: every step has looked for NaN."""

    @torch.inference_mode()
    def state(self) -> SessionState:
        """The state after the last token that :meth:`step` returned."""
        state = _read(self._decoders[0].ready, self._kept, self._given)
        return state._replace(random=self._random)

    @torch.inference_mode()
    def draft_state(self) -> SessionState:
        """The draft's state after the same tokens."""
        return _read(self._decoders[1].ready, self._draft_kept, self._given)

    def _keep_states(self) -> None:
        """Keep the states after the tokens of the last round; the next round starts from them."""
        given, drawn = self._given, self._session.state()
        if self._after is None:
            self._kept = self.state()
            draft = _read(self._decoders[1].ready, self._draft_kept, given)
        else:
            new = torch.tensor([given], device=self._kept.token.device)
            seen = self._kept.seen.scatter(1, new, True)
            self._kept = SessionState(self._after, new[:, -1], self._random, seen)
            draft = _read(self._decoders[1].ready, drawn, given[-1:])
        self._draft_kept, self._given = draft._replace(random=drawn.random), []
        self._session.go_back(self._draft_kept)

    def _round(self) -> None:
        """Propose tokens, check them, and queue the accepted tokens and one more."""
        kept = self._kept
        limits = [model.max_len for model in (self.model, self.draft) if model.max_len is not None]
        ahead = max(0, min([self.ahead, *(limit - kept.length for limit in limits)]))
        proposed, q = self._propose(ahead)
        fed = torch.cat([kept.token, proposed])[None]
        logits, after = self._decoders[0].ready.forward_chunk(fed, kept.model)
        if logits.isnan().any():
            raise output_is_nan(kept.length)
        ones = torch.nn.functional.one_hot(proposed, q.shape[1])
        p = probabilities(logits[0], self.sampling, torch.cat([kept.seen, ones]).cumsum(0) > 0)
        numbers = self._draw(ahead + 1).to(p)
        places = torch.arange(ahead, device=p.device)
        right = numbers[:-1] * q[places, proposed] <= p[places, proposed]
        accepted = int(right.long().cumprod(dim=0).sum())
        chances = p[accepted]
        if accepted < ahead:
            rest = (chances - q[accepted]).clamp(min=0)
            chances = rest if rest.sum() > 0 else chances  # equal but for rounding
        tokens = torch.cat([proposed[:accepted], pick(chances[None], numbers[-1:])])
        self._queue.extend(map(Choice, tokens[:, None], logits[0, : accepted + 1, None]))
        self._after = after if accepted == ahead else None
        self.rounds += 1
        self.proposed, self.accepted = self.proposed + ahead, self.accepted + accepted

    def _propose(self, ahead: int) -> tuple[Int[Tensor, " ahead"], Float[Tensor, "ahead vocab"]]:
        """Tokens of the draft, and the distributions that they were drawn from."""
        seen, tokens = self._kept.seen.clone(), [self._kept.token[:0]]
        chances = [torch.zeros(0, seen.shape[1], device=seen.device)]
        for _ in range(ahead):
            choice = self._session.step()
            chances.append(probabilities(choice.logits, self.sampling, seen))
            seen.scatter_(1, choice.tokens[:, None], True)
            tokens.append(choice.tokens)
        self._session.check()
        return torch.cat(tokens), torch.cat(chances)

    def _draw(self, count: int) -> Float[Tensor, " count"]:
        """The text's next random numbers; greedy decoding needs none."""
        if self.sampling.temperature == 0:
            return torch.ones(count, device=self._random.device)
        numbers = uniform(self._random, count)[0]
        self._random = self._random + torch.tensor([0, 0, count], device=self._random.device)
        return numbers


def _read(model: LanguageModel, state: SessionState, tokens: list[int]) -> SessionState:
    """The state after further tokens."""
    return extend(model, state, torch.tensor([tokens], dtype=torch.int64, device=model.device))
