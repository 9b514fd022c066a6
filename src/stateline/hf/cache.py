"""The state of a model, as the cache object that transformers carries through ``generate``."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.generate.session import ROOM
from stateline.layers import cat_states, select_rows
from stateline.layers.decoder import Decoder
from stateline.models.language_model import LanguageModel, LanguageModelState


class StatelineCache:
    """One state for all rows of a batch, under the name ``past_key_values``.

    It has the attributes that ``generate`` expects of a cache. A recurrent state cannot be cropped,
    so for assisted decoding the cache keeps an earlier state and the tokens read since then, and
    reads the remaining tokens again.

    Attributes:
        state: State of the rows; ``None`` before the first token.
        seen: Columns that were fed, padding included.
    """

    is_compileable = False
    is_croppable = True
    layers: tuple[()] = ()

    def __init__(self) -> None:
        self.state: LanguageModelState | None = None
        self.seen = 0
        self._free = 0  # steps in place for which the state has room
        self._decoder: Decoder[LanguageModel] | None = None
        self._recording = False
        self._anchor: LanguageModelState | None = None  # state before the tokens of _since
        self._since: Tensor | None = None
        self._stale = False  # whether the tokens of _since must be read again

    def __copy__(self) -> "StatelineCache":
        self._free = 0  # the state is shared from now on, so neither cache changes it in place
        copy = StatelineCache()
        copy.__dict__.update(self.__dict__, _decoder=None)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "StatelineCache":
        return self.__copy__()

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (required by transformers)
        """Columns that were fed, padding included."""
        return self.seen

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Take rows in another order; a row that is taken twice is forked."""
        self.state = select_rows(self.state, beam_idx)

    def activate_past_recording(self) -> None:
        """From now on, keep what :meth:`crop` needs."""
        self._recording, self._anchor, self._since = True, self.state, None

    def crop(self, change: int) -> None:
        """Take back the last ``-change`` tokens; zero says that all tokens so far are final.

        Raises:
            InputError: If more tokens are taken back than were recorded.
        """
        if not change:
            if not self._stale:
                self._anchor, self._since = self.state, None
            return
        recorded = 0 if self._since is None else self._since.shape[1]
        if change > 0 or -change > recorded:
            raise InputError(
                f"the cache can take back {recorded} tokens (given as a negative number), got "
                f"{change}: call activate_past_recording before reading them"
            )
        assert self._since is not None
        self.seen += change
        self._since = self._since[:, : recorded + change]
        self.state, self._free, self._stale = self._anchor, 0, True

    def prepare(self, model: LanguageModel, rows: int) -> LanguageModelState:
        """The state before the next tokens."""
        if self.state is None:
            self.state = self._anchor = model.init_state(rows)
        if self._stale:
            assert self._since is not None
            self.state = model.forward_chunk(self._since, self.state, keep=0)[1]
            self._anchor, self._since, self._stale = self.state, None, False
        return self.state

    def advance(
        self, state: LanguageModelState, columns: int, tokens: Int[Tensor, "batch length"]
    ) -> None:
        """Store the state after the next tokens, and the number of columns that they filled."""
        self.state, self._free = state, 0
        self._decoder = None  # a new turn: the weights may have changed
        self._count(columns, tokens)

    def step(self, model: LanguageModel, tokens: Int[Tensor, " batch"]) -> Tensor:
        """Logits after one more token of each row; the state is changed in place."""
        state = self.prepare(model, len(tokens))
        if not self._free:
            longest = int(state.position.max())
            state = self.state = cat_states([state], layer=model, capacity=longest + ROOM)
            self._free = ROOM
        self._decoder = self._decoder or Decoder(model)
        logits = self._decoder.step_(tokens, state)
        self._free -= 1
        self._count(1, tokens[:, None])
        return logits

    @property
    def steps_in_place(self) -> bool:
        """Whether :meth:`step` may be used: without gradients, and if no state is kept for crop."""
        return not self._recording and not torch.is_grad_enabled()

    def _count(self, columns: int, tokens: Tensor) -> None:
        self.seen += columns
        if self._recording:
            before = [] if self._since is None else [self._since]
            self._since = torch.cat([*before, tokens], dim=1)
