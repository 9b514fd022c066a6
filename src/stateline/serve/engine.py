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
from stateline.generate.session import output_is_nan
from stateline.layers import cat_states
from stateline.models.likelihood import log_probabilities
from stateline.serve.metrics import Metrics

READ_AT_ONCE = 1024
"""Prompt tokens that are read between two steps of the rows that decode."""

PER_STEP, LATEST = 50, 0.1
"""Pieces that are delivered per step, on average, and seconds after which all are delivered.

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
    """Limits of a server: for all clients together, and for one text or request.

    Attributes:
        rows: Texts that are decoded together.
        waiting: Texts that wait for a row.
        new_tokens: New tokens of one text.
        length: Tokens of one text, new ones included.
        seconds: Time of one text from its arrival; after that time the text ends.
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
    """A token and its log-probability in nats, and the same for the likeliest tokens."""

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
        reused: Tokens before the answer, earlier turns included, that a kept state covers.
        length: Tokens of the text so far, with the prompt.
        finish: ``stop``, ``length`` or ``time`` if this is the last piece.
        key: Key of the state so far; in the last piece, the key under which it is kept.
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
        after: Key of the kept state that it continues.
        sampling: How tokens are chosen.
        seed: Seed of the random choices.
        new_tokens: Largest number of new tokens.
        stop: Strings before which the text ends.
        log_probs: Number of likeliest tokens to return with each token; ``None`` for no
            log-probabilities.
        salt: Kept states are shared only with texts of the same salt.
        store: Whether the state at the end must outlive the process.
        name: Key under which the state at the end is kept; by default the hash of the whole text.
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
class _ActiveRow:
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

    Before each step, rows of clients that have left are removed, and at most ``READ_AT_ONCE``
    tokens of waiting prompts are read; a completely read prompt joins the rows. Except for
    rounding, each row gets the tokens that it would get alone, since its random numbers follow from
    its own seed. ``deliver`` gets the pieces of all rows, in the engine's thread.
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
        self._arrived: deque[_ActiveRow] = deque()
        self._waiting: deque[_ActiveRow] = deque()
        self._rows: list[_ActiveRow] = []
        self._session: Session | None = None  # outlives its rows, for its graphs
        self._held: list[tuple[Row, Piece]] = []
        self._steps, self._due = 0, 0.0  # since the last delivery, and when the next is due
        self._changed = Condition()
        self._stopped = False
        self._thread = Thread(target=self._run, name="stateline-engine", daemon=True)

    @property
    def running(self) -> bool:
        """Whether texts are taken and decoded."""
        return self._thread.is_alive() and not self._stopped

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
                f"a text may have at most {limits.new_tokens} new tokens, got {row.new_tokens}"
            )
        text = TextStream(self.tokenizer, row.stop)  # until what it follows has been read
        reading = self.prefixes.pieces(row.tokens, row.after, row.salt)
        active = _ActiveRow(row, text, time.monotonic() + limits.seconds, reading)
        if row.after is None:
            self._check_length(active, len(row.tokens))
        with self._changed:
            if self._stopped:
                raise StoppedError("the server is ending: ask again later")
            if len(self._arrived) + len(self._waiting) >= limits.waiting:
                raise BusyError(f"{limits.waiting} requests wait already: ask again later")
            self._arrived.append(active)
            self._changed.notify()

    def _check_length(self, active: _ActiveRow, length: int) -> None:
        """Check a text of a known length, and reserve the memory of its state."""
        wanted, limits = length + active.row.new_tokens, self.limits
        if wanted > limits.length:
            raise InputError(
                f"a text may have at most {limits.length} tokens, new ones included, got {wanted}"
            )
        check_length(self.model, length, active.row.new_tokens)
        active.size = self.model.state_bytes(wanted)
        if active.size > limits.memory:
            raise InputError(
                f"the state of {wanted} tokens has {active.size} bytes, more than the "
                f"{limits.memory} of all rows: shorten the text"
            )

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                out: list[tuple[Row, Piece]] = []
                try:
                    self._remove_left()
                    self._read(out)
                    if self._rows:
                        self._step(out)
                except Exception as error:
                    log.exception("decoding failed")
                    out += self._fail(error)
                kept = self.prefixes
                self.metrics.now(len(self._rows), len(self._waiting), kept.in_memory, kept.on_disk)
                self._deliver_if_due(out)
            ending = StoppedError("the server is ending: ask again later")
            self._deliver(self._held + self._fail(ending))

    def _deliver_if_due(self, pieces: list[tuple[Row, Piece]]) -> None:
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

    def _remove_left(self) -> None:
        """Remove rows whose clients have left."""
        self._waiting = deque(active for active in self._waiting if not active.row.left)
        self._keep_rows([place for place, active in enumerate(self._rows) if not active.row.left])

    def _keep_rows(self, places: list[int]) -> None:
        if self._session is not None and len(places) < len(self._rows):
            self._session.select(places)
            self._rows = [self._rows[place] for place in places]

    def _read(self, out: list[tuple[Row, Piece]]) -> None:
        """Read waiting prompts up to a number of tokens; complete prompts join the rows."""
        budget, ready = READ_AT_ONCE, list[_ActiveRow]()
        while self._waiting and budget > 0 and self._has_room(ready):
            active = self._waiting[0]
            if active.read is None:
                try:
                    budget -= self._read_piece(active)
                except Exception as error:
                    out.append((active.row, Piece(error=error)))
                    self._waiting.popleft()
                continue  # a text that continues another has its size only now
            self._waiting.popleft()
            budget -= 1
            before = active.row.tokens or active.read.state.token.tolist()  # of an empty turn
            active.text = TextStream(self.tokenizer, active.row.stop, after=before)
            self.metrics.read(len(active.row.tokens), active.read.reused)
            ready.append(active)
        if ready:
            self._join(ready)

    def _read_piece(self, active: _ActiveRow) -> int:
        """Read a piece of a prompt, and return its number of tokens; 0 at the end."""
        try:
            return next(active.reading)
        except StopIteration as end:
            active.read = read = end.value
        active.key, active.length = read.key, read.state.length
        if active.row.after is not None:  # its length was not known before
            self._check_length(active, active.length)
        return 0

    def _has_room(self, ready: list[_ActiveRow]) -> bool:
        """Whether one more row fits; each state takes as much memory as the largest."""
        rows = [*self._rows, *ready, self._waiting[0]]
        needed = len(rows) * max(active.size for active in rows)
        return len(rows) <= self.limits.rows and needed <= self.limits.memory

    def _join(self, ready: list[_ActiveRow]) -> None:
        self._rows += ready  # before the join: if memory runs out, they fail with the others
        states = [seeded(active.read.state, active.row.seed) for active in ready if active.read]
        samplings = [active.row.sampling for active in ready]
        if self._session is None:
            self._session = Session(self.model, cat_states(states), sampling=samplings)
        else:
            self._session.join(cat_states(states), samplings)

    def _step(self, out: list[tuple[Row, Piece]]) -> None:
        """Decode one token of each row."""
        assert self._session is not None
        begin = time.perf_counter()
        choice = self._session.step(check=False)
        nan_rows = self._session.nan_rows()
        log_probs = _log_probs(choice, [active.row.log_probs for active in self._rows])
        staying, now = [], time.monotonic()
        for place, token in enumerate(choice.tokens.tolist()):
            active = self._rows[place]
            if place in nan_rows:
                error = output_is_nan(active.length + active.made)
                log.warning("a text ends: %s", error)
                out.append((active.row, Piece(error=error)))
                continue
            finish, text = self._push(active, token, late=now > active.end)
            if finish:
                state = self._session.state([place])
                active.key = active.row.name or active.key
                self.prefixes.keep(active.key, state, now=active.row.store)
                text += active.text.finish()
            else:
                staying.append(place)
            assert active.read is not None
            reused = active.length - len(active.row.tokens) + active.read.reused
            length = active.length + active.made
            piece = Piece(text, 1, log_probs[place], reused, length, finish, active.key)
            out.append((active.row, piece))
        self.metrics.step(len(self._rows), time.perf_counter() - begin)
        self._keep_rows(staying)

    def _push(self, active: _ActiveRow, token: int, *, late: bool) -> tuple[str, str]:
        """Why the text ends after a token (empty if it goes on), and the text that is certain."""
        (active.key,) = self.prefixes.keys([token], active.key)
        active.made += 1
        text = active.text.push(token)
        if active.text.stopped:
            return "stop", text
        if active.made == active.row.new_tokens:
            return "length", text
        return "time" if late else "", text

    def _fail(self, error: Exception) -> list[tuple[Row, Piece]]:
        """End all rows, and those that wait, with an error."""
        with self._changed:
            rows = [*self._rows, *self._waiting, *self._arrived]
            self._arrived.clear()
        self._rows, self._session = [], None
        self._waiting.clear()
        return [(active.row, Piece(error=error)) for active in rows]


def _log_probs(choice: Choice, asked: list[int | None]) -> list[tuple[LogProbs, ...]]:
    """The log-probabilities of the rows that asked for them."""
    found: list[tuple[LogProbs, ...]] = [()] * len(asked)
    if all(count is None for count in asked):
        return found
    table = log_probabilities(choice.logits)
    for row, count in enumerate(asked):
        if count is not None:
            values, tokens = table[row].topk(min(count, table.shape[1]))
            token = int(choice.tokens[row])
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            found[row] = (LogProbs(token, float(table[row, token]), top),)
    return found
