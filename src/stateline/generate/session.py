"""Decoding step by step, on a state that changes in place."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from stateline.errors import InputError
from stateline.generate.graphs import TRIALS, Graphs, Record
from stateline.generate.sampling import GREEDY, Sampler, Sampling
from stateline.generate.session_state import (
    Prompt,
    SessionState,
    check_model,
    output_is_nan,
    prefill,
    prefill_whole,
    template,
)
from stateline.layers import cat_states, select_rows
from stateline.layers.decoder import Decoder
from stateline.layers.state import State, form, leaves_of, trim
from stateline.layers.stored_state import stored
from stateline.models.inputs import check_length
from stateline.models.language_model import LanguageModel, LanguageModelState
from stateline.models.likelihood import token_losses
from stateline.ops.kernel_op import values_at_hand
from stateline.settings import at_least

ROOM = 256
"""Steps that a growing state reserves room for at a time: the length of a text is not known."""

CHECK_EVERY = 32
"""On an accelerator, steps between two checks for NaN; every check synchronises."""

_NEVER = 2**62


class Choice(NamedTuple):
    """The next token of each row, and the logits that it was chosen from."""

    tokens: Int[Tensor, " batch"]
    logits: Float[Tensor, "batch vocab"]

    @property
    def log_probs(self) -> Float[Tensor, " batch"]:
        """Log-probability of each token under the model, independent of the sampling, in nats.

        Example:
            >>> Choice(torch.tensor([1]), torch.tensor([[0.0, 0.0]])).log_probs
            tensor([-0.6931])
        """
        return -token_losses(self.logits, self.tokens)


class _Read(NamedTuple):
    """Logits after prompts that were read with their last tokens; the state without these."""

    logits: Float[Tensor, "batch vocab"]
    again: Callable[[], SessionState]


class Session:
    """Decodes a batch of texts step by step, with one set of weights.

    Only the model's state grows in memory, and the steps change it in place; the state that the
    session starts from is not changed. Rows may leave (:meth:`select`) and join (:meth:`join`)
    between two steps, as in a server.

    The weights are those that the model had when the session began. If they change, the session
    goes on with the new ones, and with the state of the old ones: from the next step if PyTorch
    counts the change or a tensor was replaced; otherwise, such as after a change through ``.data``
    or NumPy, from the next :meth:`join` or :meth:`restore`, or as soon as :meth:`refresh` says so.

    On a GPU a step does not wait for its result. NaN logits are therefore found up to
    ``CHECK_EVERY`` steps late there, or at :meth:`check`, :meth:`state`, :meth:`select` and
    :meth:`join`; on the CPU at once. A server, whose rows belong to different clients, asks
    :meth:`nan_rows` instead.

    Args:
        model: A language model in evaluation mode.
        state: Result of :func:`prefill` or :func:`extend`, or a kept state.
        sampling: How tokens are chosen, for all rows or for each.
        room: Steps that a growing state reserves room for at a time.
        state_dtype: Precision in which accumulators are kept between steps, such as
            ``torch.bfloat16``, see :func:`stateline.layers.stored_state.stored`; by default their
            own. States that leave the session have their own precision again.

    Raises:
        InputError: If the state is of another kind of model or on another device, there is not one
            sampling per row, or ``room`` is not positive.

    Example:
        >>> from stateline.generate import prefill
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> session = Session(model, prefill(model, torch.tensor([[1, 2, 3]])))
        >>> session.step().tokens.shape, session.state().length
        (torch.Size([1]), 4)
    """

    def __init__(
        self,
        model: LanguageModel,
        state: SessionState,
        *,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        room: int = ROOM,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        check_model(model)
        at_least(1, room=room)
        with torch.inference_mode():  # like all calls of a session: FSDP gathers weights in it
            self._form = _form(template(model))
        _check_form(self._form, state)
        self.model, self._state_dtype = model, state_dtype
        self._dtypes = [leaf.dtype for leaf in pytree.tree_leaves(state.model)]
        self._decoder = Decoder(model)
        self._state, self._room, self._free = state, room, 0
        self._lengths = _lengths(state)
        self._sampling = sampling if isinstance(sampling, Sampling) else GREEDY
        self._samplings = _for_each(sampling, self._lengths)
        self._fits = False  # known after a step that was checked
        self._first_nan: Tensor | None = None
        self._read: _Read | None = None
        self._rows_changed()
        self._graphs: Graphs | None = None
        if state.token.is_cuda:
            self.use_graphs()

    @classmethod
    def after(
        cls,
        model: LanguageModel,
        prompt: Prompt,
        *,
        seed: int = 0,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        room: int = ROOM,
    ) -> "Session":
        """A session that begins after prompts, which are read with their last tokens.

        Its first step calls no model, so the first tokens come sooner than after
        :func:`prefill`. If a state is asked for or rows change before that step, the prompts are
        read again, by :func:`prefill`.

        Args:
            model: A language model in evaluation mode.
            prompt: As of :func:`prefill`.
            seed: Seed of the random choices.
            sampling: As of the class.
            room: As of the class.

        Raises:
            InputError: As of :func:`prefill` and of the class.

        Example:
            >>> from stateline.models.config import ModelConfig
            >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
            >>> session = Session.after(model, torch.tensor([[1, 2, 3]]))
            >>> session.step().tokens.shape, session.state().length
            (torch.Size([1]), 4)
        """
        state, logits = prefill_whole(model, prompt, seed=seed)
        session = cls(model, state, sampling=sampling, room=room)
        session._lengths = state.model.position.tolist()
        rows = [row.clone() for row in prompt]  # the caller may change them
        session._read = _Read(logits, partial(prefill, model, rows, seed=seed))
        return session

    def __copy__(self) -> "Session":
        """A session of the same model that goes on by itself: steps change a state in place."""
        other = Session(
            self.model,
            self.state(),
            sampling=self._samplings,
            room=self._room,
            state_dtype=self._state_dtype,
        )
        other._sampling = self._sampling
        return other

    def use_graphs(self, record: Record | None = None) -> None:
        """Decode by recorded graphs, the default on CUDA devices; see :class:`Graphs`."""
        self._graphs = Graphs(self._step_, record)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Go on with the weights that the model has now, after a change that nobody counts.

        Raises:
            InputError: If the model was cast or moved: its states have other dtypes or are
                elsewhere now.
        """
        self._decoder.refresh()
        self._fits = False
        if self._graphs is not None:
            self._graphs.clear()
        self._check_kinds()

    @torch.inference_mode()
    def step(
        self, *, check: bool = True, adjust: Callable[[Tensor], Tensor] | None = None
    ) -> Choice:
        """Feed the last token of each row, and choose the next.

        Args:
            adjust: Gives the logits to choose from; the result has the logits of the model.
            check: Raise an error if logits are NaN. Otherwise such a row goes on with arbitrary
                tokens, until :meth:`nan_rows` is asked.

        Raises:
            InputError: If logits are NaN, all rows have left, the model was cast or moved, or it
                has no more positions.
        """
        if not self._lengths:
            raise InputError("the session has no rows left: join a state before the next step")
        check_length(self.model.max_len, max(self._lengths))  # here: no value is on the device
        logits = self._next_logits() if self._read is None else self._read.logits
        self._watch(logits, check)
        state, self._read = self._state, None
        numbers, random = self._sampler.draw(state.random)
        chosen_from = logits if adjust is None else adjust(logits)
        tokens = self._sampler.choose(chosen_from, numbers, state.seen)
        state.seen.scatter_(1, tokens[:, None], True)
        self._state = SessionState(state.model, tokens, random, state.seen)
        self._lengths = [length + 1 for length in self._lengths]
        return Choice(tokens, logits)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in the given order.

        Raises:
            InputError: If there is no such row, or logits of one of them were NaN.
        """
        self._before_last()
        every = torch.arange(len(self._lengths), device="cpu")
        rows = select_rows(every, rows).tolist()  # also from a mask
        self.check(rows)
        self._state = select_rows(self._state, rows)
        self._lengths = [self._lengths[row] for row in rows]
        self._samplings = [self._samplings[row] for row in rows]
        self._rows_changed()

    @torch.inference_mode()
    def join(
        self, state: SessionState, sampling: Sampling | Sequence[Sampling] | None = None
    ) -> None:
        """Add the rows of a state of the same model after the present rows.

        Every row continues as it would alone: its random numbers follow from its own seed and row
        number, see :func:`seeded`.

        Args:
            state: The rows.
            sampling: How their tokens are chosen; by default by the sampling of the session if it
                was given one for all rows, else greedily.

        Raises:
            InputError: If the state is of another kind of model or on another device, there is not
                one sampling per row, or logits were NaN. The session then stays as it was.
        """
        self.check()
        _check_form(self._form, state)
        self._before_last()
        self._renew()
        parts, lengths = [state], _lengths(state)
        if self._lengths:
            parts.insert(0, trim(self._own(self._state)))
        samplings = _for_each(self._sampling if sampling is None else sampling, lengths)
        self._state, self._free = cat_states(parts), 0
        self._lengths += lengths
        self._samplings += samplings
        self._rows_changed()

    def restore(self, state: SessionState) -> None:
        """Continue from another state with the same number of rows, such as an earlier one.

        Raises:
            InputError: If the number of rows differs, or the state is of another kind of model or
                on another device. The session then stays as it was.
        """
        self._renew()
        self.go_back(state)

    def go_back(self, state: SessionState) -> None:
        """As :meth:`restore`, where the weights are known not to have changed."""
        _check_form(self._form, state)
        lengths = _lengths(state)
        if len(lengths) != len(self._lengths):
            raise InputError(
                f"a state to restore must have the {len(self._lengths)} rows of the session, got "
                f"{len(lengths)}: select rows of the session first, or begin a new one"
            )
        self._state, self._free, self._lengths, self._read = state, 0, lengths, None
        self._rows_changed()

    @torch.no_grad()
    def state(self, rows: Sequence[int] | None = None) -> SessionState:
        """A copy of the state without reserved room, to keep, fork or save.

        Args:
            rows: The rows to copy; by default all.

        Raises:
            InputError: If logits of one of them were NaN.
        """
        self._before_last()
        self.check(rows)
        state = self._state if rows is None else select_rows(self._state, rows)
        return pytree.tree_map(torch.clone, trim(self._own(state)))

    def check(self, rows: Sequence[int] | None = None) -> None:
        """Wait for the steps so far, and raise InputError if one of them gave NaN.

        Args:
            rows: The rows to check; by default all.
        """
        if self._first_nan is None:
            return
        first = self._first_nan if rows is None else self._first_nan[list(rows)]
        if len(first) and int(first.min()) != _NEVER:
            raise output_is_nan(int(first.min()))

    def nan_rows(self) -> list[int]:
        """Wait for the steps so far, and find the rows whose logits were NaN.

        No row depends on another, so the others are right; these can only leave (:meth:`select`).
        """
        if self._first_nan is None:
            return []
        return (self._first_nan != _NEVER).nonzero()[:, 0].tolist()

    def _next_logits(self) -> Float[Tensor, "batch vocab"]:
        """Feed the last token of each row."""
        steps = 1 if self._graphs is None else TRIALS
        if self._free < steps:
            self._make_room(steps)
        state = self._state
        if self._decoder.is_stale():
            self.refresh()
        if not self._fits:
            self._check_kinds()
            self._decoder.check(state.token, state.model)
            self._fits = True
        logits, after = self._run(state.token, state.model)
        self._state, self._free = state._replace(model=after), self._free - 1
        return logits

    def _before_last(self) -> None:
        """Go back to the state before the last tokens, if the first step was not taken yet."""
        if self._read is not None:
            self.go_back(self._read.again())

    def _own(self, state: SessionState) -> SessionState:
        """The state with every tensor in its own precision."""
        leaves, structure = pytree.tree_flatten(state.model)
        pairs = zip(leaves, self._dtypes, strict=True)
        model = pytree.tree_unflatten([leaf.to(dtype) for leaf, dtype in pairs], structure)
        return state._replace(model=model)

    def _run(
        self, token: Int[Tensor, " batch"], state: LanguageModelState
    ) -> tuple[Float[Tensor, "batch vocab"], LanguageModelState]:
        """Logits and changed state, by a graph where there are graphs.

        A new graph is tried in several steps, which need positions that the model has.
        """
        limit, last = self.model.max_len, max(self._lengths) + TRIALS - 1
        if self._graphs is None or (limit is not None and last > limit):
            return self._step_(token, state), state
        logits, after = self._graphs(token, state)
        return logits.clone(), after

    def _step_(self, token: Tensor, state: LanguageModelState) -> Tensor:
        """Logits after a token that is known to fit the state, which changes in place."""
        return self._decoder.ready.step_(token, state)

    def _renew(self) -> None:
        """Find changes of weights that nobody counts."""
        if self._decoder.changed():
            self.refresh()

    def _check_kinds(self) -> None:
        """Raise InputError if the model makes states of another dtype or elsewhere by now."""
        wanted, found = map(_kinds, (self.model.init_state(1), self._own(self._state).model))
        if wanted != found:
            new, old = next((w, f) for w, f in zip(wanted, found, strict=True) if w != f)
            raise InputError(
                "the weights were cast or moved while a session lives: its state must be "
                f"{new[0]} on {new[1]} now, got {old[0]} on {old[1]}; prefill again"
            )

    def _make_room(self, steps: int) -> None:
        """Reserve room for these steps: joining the state to an empty one with room copies it."""
        state, rows, fed = self._state, len(self._lengths), max(self._lengths) - 1
        # few sizes, so that graphs are reused
        capacity = -(-(fed + steps) // self._room) * self._room
        empty = self.model.init_state(1, capacity=capacity)
        order = torch.arange(rows, device=state.token.device)
        grown = select_rows(cat_states([state.model, empty]), order)
        if self._state_dtype is not None:
            grown = stored(grown, self._state_dtype)
        self._state = state._replace(model=grown, seen=state.seen.clone())
        self._free = capacity - fed

    def _rows_changed(self) -> None:
        """Drop what was computed for the previous rows."""
        self._fits, self._first_nan = False, None
        self._sampler = Sampler(self._samplings, self._state.token.device)

    def _watch(self, logits: Tensor, check: bool) -> None:
        """Find NaN: at once where that is free, otherwise at regular steps."""
        at_hand, length = values_at_hand(logits), max(self._lengths)
        if at_hand and not math.isnan(logits.amax()):  # NaN, if any of them is
            return
        here = torch.where(logits.amax(dim=-1).isnan(), length, _NEVER)
        before = self._first_nan
        self._first_nan = here if before is None else torch.minimum(before, here)
        if check and (at_hand or length % CHECK_EVERY == 0):
            self.check()


def _kinds(state: State) -> list[tuple[torch.dtype, torch.device, int]]:
    """Dtype, device and number of axes of every tensor of a state."""
    return [(leaf.dtype, leaf.device, leaf.ndim) for leaf in pytree.tree_leaves(state)]


def _lengths(state: SessionState) -> list[int]:
    """Tokens of each row, including the one not yet fed."""
    return [position + 1 for position in state.model.position.tolist()]


def _form(state: SessionState) -> Any:
    """What states of one model have in common."""
    return form(state), [leaf.dtype for leaf in leaves_of(state)]


def _check_form(wanted: Any, state: SessionState) -> None:
    """Raise InputError if a state does not have the form of the session's states."""
    if _form(state) != wanted:
        got = "another" if isinstance(state, SessionState) else f"a {type(state).__name__}"
        raise InputError(
            "the rows of a session must have a state of the same model, on the same device and in "
            f"the same dtype, got {got}: give what prefill returns with the session's model"
        )


def _for_each(sampling: Sampling | Sequence[Sampling], lengths: Sequence[int]) -> list[Sampling]:
    """The sampling of each row."""
    each = [sampling] * len(lengths) if isinstance(sampling, Sampling) else [*sampling]
    if len(each) != len(lengths):
        raise InputError(
            f"sampling must be one for all rows or a list of one per row, {len(lengths)}, got a "
            f"list of {len(each)}: give as many as rows, or one that is not in a list"
        )
    return each
