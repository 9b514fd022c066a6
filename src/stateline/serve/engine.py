"""One thread reads prompts and decodes all rows together; rows join and leave between steps."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from threading import Condition, Thread
from typing import Any

import torch

from stateline.data import Tokenizer
from stateline.generate import PrefixStates, Session, SessionState, TextStream, seeded
from stateline.generate.sampling import penalize
from stateline.generate.session_state import output_is_nan
from stateline.layers import cat_states
from stateline.serve.metrics import Metrics
from stateline.serve.reading import Prompt, Reader, log_probs
from stateline.serve.rows import BusyError, Limits, Piece, Row, StoppedError

PER_STEP, LATEST = 50, 0.1
"""Pieces that are delivered per step, on average, and seconds after which all are delivered.

An event of a stream costs its server and its client as much as a token of a small model, so with
many rows an event gets the tokens of several steps.
"""

log = getLogger("stateline.serve")


@dataclass(eq=False)
class _ActiveRow:
    """A row that is decoded: its prompt had ``length`` tokens, of which ``reused`` were kept."""

    row: Row
    text: TextStream
    end: float
    size: int
    length: int
    reused: int
    key: bytes
    made: int = 0

    def piece(self, text: str = "", finish: str = "", **more: Any) -> Piece:
        """A piece with the numbers so far."""
        length = self.length + self.made
        return Piece(text, reused=self.reused, length=length, finish=finish, key=self.key, **more)


class Engine:
    """Reads prompts and decodes all rows together, in one thread.

    Before each step, rows of clients that have left are removed, and prompts are read in turns
    (:class:`Reader`); a completely read prompt joins the rows. Except for rounding, each row gets
    the tokens that it would get alone, since its random numbers follow from its own seed.
    ``deliver`` gets the pieces of all rows, in the engine's thread.
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
        self._arrived: deque[Prompt] = deque()
        self._forgotten: list[bytes] = []
        self._reader = Reader(prefixes, limits)
        self._waiting = 0  # texts of the reader, or a few more
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

    def submit(self, *rows: Row) -> None:
        """Take a prompt, from any thread: all rows have its tokens, and differ in their choices.

        Raises:
            InputError: If the text is beyond a limit.
            BusyError: If too many texts wait.
            StoppedError: If the engine is stopping.
        """
        prompt = Prompt([*rows], time.monotonic() + self.limits.seconds)
        TextStream(self.tokenizer, rows[0].stop)  # checks the stop strings
        self._reader.check(prompt, len(rows[0].tokens))
        with self._changed:
            if self._stopped:
                raise StoppedError("the server is ending: ask again later")
            waiting = self._waiting + sum(len(one.rows) for one in self._arrived)
            if waiting + len(rows) > self.limits.waiting:
                raise BusyError(f"{waiting} requests wait already: ask again later")
            self._arrived.append(prompt)
            self._changed.notify()

    def forget(self, key: bytes) -> None:
        """Keep a state no longer, from any thread."""
        with self._changed:
            self._forgotten.append(key)
            self._changed.notify()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                out: list[tuple[Row, Piece]] = []
                try:
                    self._remove_left(out)
                    self._read(out)
                    if self._rows:
                        self._step(out)
                except Exception as error:
                    log.exception("decoding failed")
                    out += self._fail(error)
                kept = self.prefixes
                self.metrics.now(len(self._rows), len(self._reader), kept.in_memory, kept.on_disk)
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
            while not (self._stopped or self._arrived or self._forgotten or self._busy()):
                self._changed.wait()
            self._reader.waiting.extend(self._arrived)
            self._arrived.clear()
            self._waiting = len(self._reader)
            forgotten, self._forgotten = self._forgotten, []
        for key in forgotten:
            self.prefixes.remove(key)
        return not self._stopped

    def _busy(self) -> bool:
        return bool(self._rows or len(self._reader))

    def _remove_left(self, out: list[tuple[Row, Piece]]) -> None:
        """Remove rows whose clients have left, and prompts whose time has ended."""
        out += _errors(self._reader.remove())
        self._keep_rows([place for place, active in enumerate(self._rows) if not active.row.left])

    def _keep_rows(self, places: list[int]) -> None:
        if self._session is not None and len(places) < len(self._rows):
            self._session.select(places)
            self._rows = [self._rows[place] for place in places]

    def _read(self, out: list[tuple[Row, Piece]]) -> None:
        """Read prompts for a while; complete prompts join the rows."""
        rows, largest = len(self._rows), max((active.size for active in self._rows), default=0)
        out += _errors(self._reader.read(rows, largest))
        ready = list(self._reader.take(rows, largest))
        found = [pair for prompt in ready for pair in self._begin(prompt, out)]
        if found:
            self._join(found)

    def _begin(
        self, prompt: Prompt, out: list[tuple[Row, Piece]]
    ) -> Iterable[tuple[_ActiveRow, SessionState]]:
        """The rows of a prompt that was read; those without new tokens end at once."""
        assert prompt.found is not None
        read, told = prompt.found.read, prompt.found.log_probs
        self.metrics.read(len(prompt.tokens), read.reused)
        before = prompt.tokens or read.state.token.tolist()  # of an empty turn
        length = read.state.length
        reused = length - len(prompt.tokens) + read.reused
        for row in prompt.rows:
            text = TextStream(
                self.tokenizer,
                row.stop,
                after=before,
                ends=row.ends,
                least=row.least,
                special=row.special,
            )
            active = _ActiveRow(row, text, prompt.end, prompt.size, length, reused, read.key)
            if told or not row.new_tokens:
                out.append(
                    (row, active.piece(prompt=told, finish="" if row.new_tokens else "length"))
                )
            if row.new_tokens:
                yield active, seeded(read.state, row.seed)

    def _join(self, ready: Sequence[tuple[_ActiveRow, SessionState]]) -> None:
        rows = [active for active, _ in ready]
        self._rows += rows  # before the join: if memory runs out, they fail with the others
        states = cat_states([state for _, state in ready])
        samplings = [active.row.sampling for active in rows]
        if self._session is None:
            self._session = Session(self.model, states, sampling=samplings)
        else:
            self._session.join(states, samplings)

    def _step(self, out: list[tuple[Row, Piece]]) -> None:
        """Decode one token of each row."""
        assert self._session is not None
        begin = time.perf_counter()
        adjust = partial(penalize, [active.row.penalties for active in self._rows])
        choice = self._session.step(check=False, adjust=adjust)
        nan_rows = self._session.nan_rows()
        asked = [active.row.log_probs for active in self._rows]
        told = iter(log_probs(choice, asked))
        staying, now = [], time.monotonic()
        for place, token in enumerate(choice.tokens.tolist()):
            active = self._rows[place]
            own = () if asked[place] is None else (next(told),)
            if place in nan_rows:
                error = output_is_nan(active.length + active.made)
                log.warning("a text ends: %s", error)
                out.append((active.row, Piece(error=error)))
                continue
            finish, text = self._push(active, token, late=now > active.end)
            if finish:
                state = self._session.state([place])
                active.key = active.row.name or active.key
                if active.key:
                    self.prefixes.keep(active.key, state, now=active.row.store, trusted=True)
                text += active.text.finish()
            else:
                staying.append(place)
            out.append((active.row, active.piece(text, finish, tokens=1, log_probs=own)))
        self.metrics.step(len(self._rows), time.perf_counter() - begin)
        self._keep_rows(staying)

    def _push(self, active: _ActiveRow, token: int, *, late: bool) -> tuple[str, str]:
        """Why the text ends after a token (empty if it goes on), and the text that is certain."""
        if active.key:
            (active.key,) = self.prefixes.keys([token], active.key)
        active.made += 1
        active.row.penalties.counts[token] += 1
        text = active.text.push(token)
        if active.text.stopped:
            return "stop", text
        if active.made == active.row.new_tokens:
            return "length", text
        return "time" if late else "", text

    def _fail(self, error: Exception) -> list[tuple[Row, Piece]]:
        """End all rows, and those that wait, with an error."""
        with self._changed:
            prompts = [*self._reader.all(), *self._arrived]
            self._arrived.clear()
        rows = [active.row for active in self._rows]
        rows += [row for prompt in prompts for row in prompt.rows]
        self._rows, self._session = [], None
        self._reader.clear()
        return [(row, Piece(error=error)) for row in rows]


def _errors(found: Iterable[tuple[Prompt, Exception]]) -> list[tuple[Row, Piece]]:
    return [(row, Piece(error=error)) for prompt, error in found for row in prompt.rows]
