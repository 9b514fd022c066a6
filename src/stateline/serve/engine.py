"""One thread reads prompts and decodes all rows together; rows join and leave between steps."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from threading import Condition, Thread

import torch

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate import (
    Choice,
    PrefixStates,
    Read,
    Sampling,
    Session,
    TextStream,
    check_length,
    seeded,
)
from stateline.layers import cat_states
from stateline.serve.metrics import Metrics

READ_AT_ONCE = 1024
"""Prompt tokens that are read between two steps of the rows that decode."""

PER_STEP, LATEST = 50, 0.1
"""Pieces that are handed over per step, on average, and seconds after which all are.

An event of a stream costs its server and its client as much as a token of a small model, so with
many rows an event gets the tokens of several steps.
"""

log = getLogger("stateline.serve")


class BusyError(InputError):
    """There are too many requests."""

    status = 429


class StoppedError(InputError):
    """The server is ending."""

    status = 503


@dataclass(frozen=True)
class Limits:
    """What the clients of a server can take together and alone.

    Attributes:
        rows: Texts that are decoded together.
        waiting: Texts that wait for a row.
        new_tokens: New tokens of one text.
        length: Tokens of one text, with its new ones.
        seconds: Time of one text from its arrival; then it ends where it is.
        memory: Bytes of the states of all rows.
        body: Bytes of one request.
    """

    rows: int = 64
    waiting: int = 1024
    new_tokens: int = 4096
    length: int = 1 << 20
    seconds: float = 600.0
    memory: int = 1 << 31
    body: int = 1 << 23

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"the limit {name} must be positive, got {value}")


@dataclass(frozen=True)
class LogProbs:
    """A token and its log-probability in nats, and the same of the likeliest tokens."""

    token: int
    log_prob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """What one step adds to a text.

    Attributes:
        text: Text that is certain now.
        tokens: Number of new tokens.
        log_probs: Log-probabilities of these tokens, if they were asked for.
        reused: Tokens before the answer, of earlier turns too, that came with a kept state; known
            with the first piece.
        length: Tokens of the whole text.
        finish: ``stop`` or ``length`` if this is the last piece.
        key: Under which the state at the end is kept, with the last piece.
        error: Why the text ended, if it was not finished.
    """

    text: str = ""
    tokens: int = 0
    log_probs: tuple[LogProbs, ...] = ()
    reused: int = 0
    length: int = 0
    finish: str = ""
    key: bytes = b""
    error: Exception | None = None


@dataclass(eq=False)
class Row:
    """A text that a client has asked for.

    Attributes:
        tokens: The prompt, or its continuation.
        after: Hash of the kept text that it continues.
        sampling: How tokens are chosen.
        seed: Seed of the random choices.
        new_tokens: Largest number of new tokens.
        stop: Strings before which the text ends.
        log_probs: Number of likeliest tokens to tell with each; ``None`` tells nothing.
        salt: Kept states are shared with texts of the same salt.
        store: Whether the state at the end must outlive the process.
        name: Under which the state at the end is kept; by default the hash of the whole text.
        put: Called by the engine's ``deliver`` with every piece.
        left: Set when the client has left; the row then leaves before the next step.
    """

    tokens: list[int]
    after: bytes | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    new_tokens: int = 16
    stop: Sequence[str] = ()
    log_probs: int | None = None
    salt: str = ""
    store: bool = False
    name: bytes = b""
    left: bool = False
    put: Callable[[Piece], None] = lambda piece: None  # noqa: ARG005


@dataclass(eq=False)
class _Going:
    """A row that the engine reads or decodes."""

    row: Row
    text: TextStream
    end: float
    reading: Generator[int, None, Read]
    size: int = 0
    length: int = 0
    made: int = 0
    read: Read | None = None
    key: bytes = b""


class Engine:
    """Reads prompts and decodes all rows together, in one thread.

    Before each step, rows of clients that left go, and at most ``READ_AT_ONCE`` tokens of waiting
    prompts are read; a prompt that is read joins the rows. Each row gets the tokens that it would
    get alone but for rounding, since its random numbers follow from its own seed. ``deliver`` gets
    the pieces of all rows, in the engine's thread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prefixes: PrefixStates,
        *,
        limits: Limits,
        deliver: Callable[[list[tuple[Row, Piece]]], None],
        metrics: Metrics,
    ) -> None:
        self.model, self.tokenizer, self.prefixes = prefixes.model, tokenizer, prefixes
        self.limits, self.metrics, self._deliver = limits, metrics, deliver
        self._arrived: deque[_Going] = deque()
        self._waiting: deque[_Going] = deque()
        self._rows: list[_Going] = []
        self._session: Session | None = None
        self._held: list[tuple[Row, Piece]] = []
        self._steps, self._due = 0, 0.0  # since pieces were handed over, and when they are next
        self._changed = Condition()
        self._stopped = False
        self._thread = Thread(target=self._run, name="stateline-engine", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def end(self) -> None:
        """End all rows with an error, soon."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def stop(self) -> None:
        """End all rows, and write the kept states to their folder."""
        self.end()
        self._thread.join()
        self.prefixes.flush()

    def submit(self, row: Row) -> None:
        """Take a text, from any thread.

        Raises:
            InputError: If the text is beyond a limit.
            BusyError: If too many texts wait.
            StoppedError: If the engine is stopping.
        """
        limits = self.limits
        if row.new_tokens > limits.new_tokens:
            raise InputError(
                f"at most {limits.new_tokens} new tokens are given, got {row.new_tokens}"
            )
        text = TextStream(self.tokenizer, row.stop)
        reading = self.prefixes.pieces(row.tokens, row.after, row.salt)
        going = _Going(row, text, time.monotonic() + limits.seconds, reading)
        if row.after is None:
            self._check_length(going, len(row.tokens))
        with self._changed:
            if self._stopped:
                raise StoppedError("the server is ending: ask again later")
            if len(self._arrived) + len(self._waiting) >= limits.waiting:
                raise BusyError(f"{limits.waiting} requests wait already: ask again later")
            self._arrived.append(going)
            self._changed.notify()

    def _check_length(self, going: _Going, length: int) -> None:
        """Check a text of a known length, and reserve the memory of its state."""
        wanted, limits = length + going.row.new_tokens, self.limits
        if wanted > limits.length:
            raise InputError(
                f"a text may have at most {limits.length} tokens with its new ones, got {wanted}"
            )
        check_length(self.model, length, going.row.new_tokens)
        going.size = self.model.state_bytes(wanted)
        if going.size > limits.memory:
            raise InputError(
                f"the state of {wanted} tokens has {going.size} bytes, more than the "
                f"{limits.memory} of all rows: shorten the text"
            )

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                out: list[tuple[Row, Piece]] = []
                try:
                    self._leave()
                    self._read(out)
                    if self._rows:
                        self._step(out)
                except Exception as error:
                    log.exception("decoding failed")
                    out += self._fail(error)
                self._tell()
                self._hand_over(out)
            ending = StoppedError("the server is ending: ask again later")
            self._deliver(self._held + self._fail(ending))

    def _hand_over(self, pieces: list[tuple[Row, Piece]]) -> None:
        """Deliver pieces, unless they can wait for the next step."""
        self._held += pieces
        now, self._steps = time.monotonic(), self._steps + 1
        if self._held and (len(self._rows) <= PER_STEP * self._steps or now >= self._due):
            self._deliver(self._held)
            self._held, self._steps, self._due = [], 0, now + LATEST

    def _take(self) -> bool:
        """Take what has arrived; wait if there is nothing else to do. False at the end."""
        with self._changed:
            while not (self._stopped or self._arrived or self._waiting or self._rows):
                self._changed.wait()
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            return not self._stopped

    def _leave(self) -> None:
        """Let rows go whose clients have left."""
        self._waiting = deque(going for going in self._waiting if not going.row.left)
        self._keep_rows([place for place, going in enumerate(self._rows) if not going.row.left])

    def _keep_rows(self, places: list[int]) -> None:
        if self._session is not None and len(places) < len(self._rows):
            self._session.select(places)
            self._rows = [self._rows[place] for place in places]
        if not self._rows:
            self._session = None

    def _read(self, out: list[tuple[Row, Piece]]) -> None:
        """Read waiting prompts for a while; those that are read join the rows."""
        budget, ready = READ_AT_ONCE, list[_Going]()
        while self._waiting and budget > 0 and self._has_room(ready):
            going = self._waiting[0]
            try:
                budget -= next(going.reading)
                continue
            except StopIteration as end:
                going.read = end.value
            except Exception as error:
                out.append((going.row, Piece(error=error)))
            self._waiting.popleft()
            if going.read is None:
                continue
            budget -= 1
            going.key, going.length = going.read.key, going.read.state.length
            try:
                if going.row.after is not None:  # its length was not known before
                    self._check_length(going, going.length)
            except InputError as error:
                out.append((going.row, Piece(error=error)))
                continue
            self.metrics.read(len(going.row.tokens), going.read.reused)
            ready.append(going)
        if ready:
            self._join(ready)

    def _has_room(self, ready: list[_Going]) -> bool:
        """Whether one more row fits; growing states have as much room as the longest."""
        rows = [*self._rows, *ready, self._waiting[0]]
        needed = len(rows) * max(going.size for going in rows)
        fits = len(rows) == 1 or needed <= self.limits.memory
        return len(rows) <= self.limits.rows and fits

    def _join(self, ready: list[_Going]) -> None:
        self._rows += ready  # first: if there is no memory, they fail with the others
        states = [seeded(going.read.state, going.row.seed) for going in ready if going.read]
        samplings = [going.row.sampling for going in ready]
        if self._session is None:
            self._session = Session(self.model, cat_states(states), sampling=samplings)
        else:
            self._session.join(cat_states(states), samplings)

    def _step(self, out: list[tuple[Row, Piece]]) -> None:
        """Decode one token of each row."""
        assert self._session is not None
        begin = time.perf_counter()
        choice = self._session.step()
        self._session.check()
        told = _log_probs(choice, [going.row.log_probs for going in self._rows])
        staying, now = [], time.monotonic()
        for place, token in enumerate(choice.tokens.tolist()):
            going = self._rows[place]
            finish, text = self._push(going, token, late=now > going.end)
            if finish:
                state = self._session.state([place])
                going.key = going.row.name or going.key
                self.prefixes.keep(going.key, state, now=going.row.store)
                text += going.text.finish()
            else:
                staying.append(place)
            assert going.read is not None
            reused = going.length - len(going.row.tokens) + going.read.reused
            length = going.length + going.made
            piece = Piece(text, 1, told[place], reused, length, finish, going.key)
            out.append((going.row, piece))
        self.metrics.step(len(self._rows), time.perf_counter() - begin)
        self._keep_rows(staying)

    def _push(self, going: _Going, token: int, *, late: bool) -> tuple[str, str]:
        """Why the text ends with a token, if it does, and the text that is certain with it."""
        (going.key,) = self.prefixes.keys([token], going.key)
        going.made += 1
        if token == self.tokenizer.end_of_text:
            return "stop", ""
        text = going.text.push(token)
        if going.text.stopped:
            return "stop", text
        return "length" if late or going.made == going.row.new_tokens else "", text

    def _fail(self, error: Exception) -> list[tuple[Row, Piece]]:
        """End all rows, and those that wait, with an error."""
        with self._changed:
            rows = [*self._rows, *self._waiting, *self._arrived]
            self._arrived.clear()
        self._rows, self._session = [], None
        self._waiting.clear()
        return [(going.row, Piece(error=error)) for going in rows]

    def _tell(self) -> None:
        kept = self.prefixes
        self.metrics.now(len(self._rows), len(self._waiting), kept.in_memory, kept.on_disk)


def _log_probs(choice: Choice, asked: list[int | None]) -> list[tuple[LogProbs, ...]]:
    """The log-probabilities of the rows that asked for them."""
    found: list[tuple[LogProbs, ...]] = [()] * len(asked)
    if all(count is None for count in asked):
        return found
    logits = choice.logits.to(torch.promote_types(choice.logits.dtype, torch.float32))
    table = logits.log_softmax(dim=-1)
    for row, count in enumerate(asked):
        if count is not None:
            values, tokens = table[row].topk(min(count, table.shape[1]))
            token = int(choice.tokens[row])
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            found[row] = (LogProbs(token, float(table[row, token]), top),)
    return found
