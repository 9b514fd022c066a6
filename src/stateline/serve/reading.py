"""Prompts on their way to the rows: read in turns, so that a short one never waits for a long one.

A prompt waits until its state has room, then is read piece by piece, and then waits for its place
among the rows. The next piece is of a prompt that has had the fewest turns, and among these of the
one with the least left to read.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from stateline.errors import InputError
from stateline.generate import Choice, PrefixStates, Read, check_length
from stateline.generate.session_state import first_token
from stateline.models.language_model import LanguageModel
from stateline.models.likelihood import log_probabilities
from stateline.serve.rows import LateError, Limits, LogProbs, Row

READ_AT_ONCE = 1024
"""Largest number of prompt tokens that are read between two steps of the rows that decode."""

TURN = 0.2
"""Seconds after which no further piece is read between two steps; a piece takes at most as long."""

LEAST = 32
"""Tokens that a piece may have, however long they take."""

LOGITS_AT_ONCE = 1 << 24
"""Logits that are computed at once for the log-probabilities of a prompt."""


class Scored(NamedTuple):
    """A prompt that was read, and its log-probabilities if they were asked for."""

    read: Read
    log_probs: tuple[LogProbs, ...] = ()


class Pace:
    """The largest power of two of tokens that a model reads in ``TURN`` seconds, as measured."""

    def __init__(self) -> None:
        self._tokens = 2 * LEAST

    def __call__(self) -> int:
        """The largest number of tokens of the next piece."""
        return self._tokens

    def took(self, tokens: int, seconds: float) -> None:
        """Note how long a piece took: after a slow one pieces are shorter, after a fast longer."""
        if tokens and seconds > TURN:
            fits = int(tokens * TURN / seconds)
            self._tokens = max(LEAST, min(self._tokens, 1 << fits.bit_length() >> 1))
        elif tokens == self._tokens and seconds < TURN / 2:
            self._tokens = min(READ_AT_ONCE, 2 * tokens)


@dataclass(eq=False)
class Prompt:
    """A prompt and the rows that continue it; these differ in their choices alone.

    Attributes:
        rows: The rows.
        end: When the time of their texts ends.
        tokens: Tokens to read.
        size: Bytes of the state of one row at its end.
        turns: Turns that it has had, counted from those of the prompts that were there before.
        left: Tokens that are not read yet.
        fresh: Whether it has had no turn.
        reading: Reads the next piece; ``None`` before the state before is known.
        found: What was read, at the end.
    """

    rows: list[Row]
    end: float
    tokens: Sequence[int] = ()
    size: int = 0
    turns: int = 0
    left: int = 0
    fresh: bool = True
    reading: Generator[int, None, Scored] | None = None
    found: Scored | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the states of all its rows."""
        return self.size * len(self.rows)


@dataclass
class Reader:
    """The prompts that have not joined the rows yet, in the engine's thread.

    Attributes:
        waiting: Prompts that have no room yet, in the order of their arrival.
        reading: Prompts that are read.
        ready: Prompts that wait for their place among the rows.
        pace: How many tokens a piece may have.
    """

    prefixes: PrefixStates
    limits: Limits
    waiting: deque[Prompt] = field(default_factory=deque)
    reading: list[Prompt] = field(default_factory=list)
    ready: deque[Prompt] = field(default_factory=deque)
    pace: Pace = field(default_factory=Pace)
    _rest: float = 0.0

    def __len__(self) -> int:
        """Number of texts."""
        return sum(len(prompt.rows) for prompt in self.all())

    def all(self) -> Iterator[Prompt]:
        """Every prompt."""
        yield from (*self.waiting, *self.reading, *self.ready)

    def clear(self) -> None:
        """Forget all prompts."""
        for prompts in (self.waiting, self.reading, self.ready):
            prompts.clear()

    def check(self, prompt: Prompt, length: int) -> int:
        """Check a text of at least this length, size its state, and count its new tokens.

        Raises:
            InputError: If it is beyond a limit.
        """
        limits, model, row = self.limits, self.prefixes.model, prompt.rows[0]
        new = row.new_tokens
        if new is None:
            ends = [limits.length, *([] if model.max_len is None else [model.max_len + 1])]
            new = max(1, min(limits.new_tokens, min(ends) - length))
        if new > limits.new_tokens:
            raise InputError(f"a text may have at most {limits.new_tokens} new tokens, got {new}")
        wanted = length + new
        if wanted > limits.length:
            raise InputError(
                f"a text may have at most {limits.length} tokens, new ones included, got {wanted}"
            )
        check_length(model, length, new)
        prompt.size = model.state_bytes(wanted)
        if len(prompt.rows) > limits.rows or prompt.bytes > limits.memory:
            raise InputError(
                f"{len(prompt.rows)} states of {wanted} tokens have {prompt.bytes} bytes, beyond "
                f"the {limits.memory} bytes or the {limits.rows} rows of all texts: shorten the "
                "text, or ask for fewer answers"
            )
        return new

    def begin(self, prompt: Prompt) -> None:
        """Look for the state that a prompt continues, and check the length of the whole text.

        Raises:
            InputError: If there is no such state, or the text is beyond a limit.
        """
        row, model = prompt.rows[0], self.prefixes.model
        prompt.tokens, before = row.tokens, 0
        if row.after is not None:
            state = self.prefixes.find(row.after)
            before = state.length
            if row.tokens and row.tokens[0] == row.turn_end == int(state.token):
                prompt.tokens = row.tokens[1:]
        new = self.check(prompt, before + len(prompt.tokens))
        for one in prompt.rows:
            one.new_tokens = new
        prompt.left = len(prompt.tokens)
        if row.scored:
            prompt.reading = scored(model, prompt.tokens, row.log_probs or 0, self.pace)
        else:
            prompt.reading = _unscored(self.prefixes, prompt, self.pace)

    def read(self, decoding: int, largest: int) -> Iterator[tuple[Prompt, Exception]]:
        """Read pieces of prompts, and return those that failed, with their errors.

        If texts are decoded, they get as much time as the reading has taken before prompts are
        read on; the first turn of a prompt does not wait for that.

        Args:
            decoding: Number of rows that are decoded.
            largest: Bytes of the largest of their states.
        """
        begin, budget = time.monotonic(), READ_AT_ONCE
        resting = decoding > 0 and begin < self._rest
        while budget > 0 and time.monotonic() < begin + TURN:
            yield from self._admit(decoding, largest)
            some = (p for p in self.reading if p.fresh or not resting)
            prompt = min(some, key=lambda p: (p.turns, p.left), default=None)
            if prompt is None:
                break
            try:
                budget -= self._turn(prompt, begin + TURN)
            except Exception as error:
                self.reading.remove(prompt)
                yield prompt, error
        now = time.monotonic()
        self._rest = self._rest if resting else now + (now - begin)

    def _turn(self, prompt: Prompt, end: float) -> int:
        """Read pieces, and return their tokens; a piece that is only hashed counts as a turn."""
        assert prompt.reading is not None
        prompt.fresh, read = False, 1
        try:
            while read < READ_AT_ONCE and (time.monotonic() < end or prompt.left <= 1):
                begin = time.monotonic()
                tokens = next(prompt.reading)
                self.pace.took(tokens, time.monotonic() - begin)
                prompt.left -= tokens
                read += tokens or READ_AT_ONCE
        except StopIteration as end_of_text:
            prompt.found = end_of_text.value
            self.reading.remove(prompt)
            self.ready.append(prompt)
        prompt.turns += 1
        return read

    def _admit(self, decoding: int, largest: int) -> Iterator[tuple[Prompt, Exception]]:
        """Begin to read the prompts for whose states there is room, the first to come first."""
        while self.waiting:
            prompt = self.waiting[0]
            if prompt.reading is None:
                try:
                    self.begin(prompt)
                except Exception as error:
                    self.waiting.popleft()
                    yield prompt, error
                    continue
            begun = [*self.reading, *self.ready, prompt]
            rows = decoding + sum(len(one.rows) for one in begun)
            size = decoding * largest + sum(one.bytes for one in begun)
            if rows > self.limits.rows or size > self.limits.memory:
                return
            prompt.turns = min((one.turns for one in self.reading), default=0)
            self.reading.append(self.waiting.popleft())

    def take(self, decoding: int, largest: int) -> Iterator[Prompt]:
        """Prompts that join the rows; each row takes as much memory as the largest."""
        while self.ready:
            prompt = self.ready[0]
            rows, largest = decoding + len(prompt.rows), max(largest, prompt.size)
            others = sum(one.bytes for one in (*self.reading, *self.ready)) - prompt.bytes
            if rows * largest + others > self.limits.memory:
                return
            decoding = rows
            yield self.ready.popleft()

    def remove(self) -> Iterator[tuple[Prompt, Exception]]:
        """Remove the rows whose clients have left, and return the prompts whose time has ended."""
        now = time.monotonic()
        for prompt in self.all():
            prompt.rows = [row for row in prompt.rows if not row.left]
        gone = {prompt for prompt in self.all() if not prompt.rows or now > prompt.end}
        if not gone:
            return
        self.waiting = deque(one for one in self.waiting if one not in gone)
        self.reading = [one for one in self.reading if one not in gone]
        self.ready = deque(one for one in self.ready if one not in gone)
        late = LateError(
            f"the text was not read within {self.limits.seconds:g} seconds: ask again, since what "
            "was read is kept, or shorten it"
        )
        yield from ((prompt, late) for prompt in gone if prompt.rows)


def _unscored(
    prefixes: PrefixStates, prompt: Prompt, most: Callable[[], int]
) -> Generator[int, None, Scored]:
    row = prompt.rows[0]
    return Scored((yield from prefixes.pieces(prompt.tokens, row.after, row.salt, most)))


@torch.inference_mode()
def scored(
    model: LanguageModel, tokens: Sequence[int], top: int, most: Callable[[], int]
) -> Generator[int, None, Scored]:
    """Read a text from its beginning and score its tokens; yields as ``PrefixStates.pieces``."""
    ids = torch.as_tensor(tokens, dtype=torch.int64)[None]
    model.check_tokens(ids)
    if not len(tokens):
        raise InputError("the prompt is empty: give at least one token")
    start = first_token(model, ids[:, 0])
    ids, after, found = (
        ids.to(start.token.device),
        start.model,
        [LogProbs(int(ids[0, 0]), None, ())],
    )
    done, largest = 0, max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    while done < len(tokens) - 1:
        wanted = ids[0, done + 1 :][: min(most(), largest)]
        logits, after = model.forward_chunk(ids[:, done : done + len(wanted)], after)
        found += log_probs(Choice(wanted, logits[0]), [top] * len(wanted))
        done += len(wanted)
        yield len(wanted)
    seen = start.seen.scatter(1, ids, True)
    state = start._replace(model=after, token=ids[:, -1].clone(), seen=seen)
    return Scored(Read(state, b"", 0), tuple(found))


def log_probs(choice: Choice, asked: Sequence[int | None]) -> list[LogProbs]:
    """The log-probabilities of the rows that asked for them, in their order."""
    rows = [row for row, count in enumerate(asked) if count is not None]
    if not rows:
        return []
    table = log_probabilities(choice.logits[rows])
    values, places = table.topk(min(max(asked[row] or 0 for row in rows), table.shape[1]))
    chosen = choice.tokens[rows]
    own = table.gather(1, chosen[:, None])[:, 0].tolist()
    told = zip(chosen.tolist(), own, places.tolist(), values.tolist(), strict=True)
    return [
        LogProbs(token, value, tuple(zip(top, likely, strict=True))[: asked[row]])
        for row, (token, value, top, likely) in zip(rows, told, strict=True)
    ]
