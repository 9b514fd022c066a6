"""States that are kept under the hash of what was read, so that nothing is read twice."""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.errors import InputError
from stateline.files import cannot_write
from stateline.generate.session_state import PREFILL_CHUNK, SessionState, extend, first_token
from stateline.generate.state_files import Kept, load_kept
from stateline.generate.text import NOTHING_HELD
from stateline.layers.decoder import Decoder
from stateline.layers.state import ForeignState, fingerprint, nbytes, save_state
from stateline.models.language_model import LanguageModel

MEMORY, DISK = 1 << 28, 1 << 32
"""Bytes of kept states in memory and on disk, by default."""

HASHED_AT_ONCE = 1 << 14
"""Tokens that are hashed between two pieces: tens of milliseconds."""

_ENDING = ".state"

log = getLogger("stateline.generate")


class Read(NamedTuple):
    """A text of one row that was read.

    Attributes:
        state: The state after it, whose last token is not yet fed.
        key: The hash under which the state is kept.
        reused: Number of its tokens that a kept state covers, which were not read again.
    """

    state: SessionState
    key: bytes
    reused: int


class PrefixStates:
    """Keeps states of a model under the hash of its weights and of all tokens before them.

    A text continues from its longest kept prefix, which may end at any token. :meth:`read` keeps a
    state at every multiple of ``every`` tokens, and at the end of each text; :meth:`keep` adds
    others, such as the end of an answer.

    A kept state is stored without rounding. ``read`` cuts texts at the multiples of ``every`` and
    at the ends of the texts that it is given, so a continuation equals, bit by bit,
    ``forward_chunk`` over chunks that are cut at the same places. With other cuts, or with tokens
    that were read by steps, results differ by rounding, within the limits of the law (relative
    errors below 1e-4 in float32, 1e-9 in float64). With the default ``every``, a text whose kept
    prefixes all end at multiples of it gives the same bits as :func:`stateline.generate.prefill`.

    States are kept for the weights that they were computed with. :meth:`read` looks whether the
    model still has them, in less time than a token takes (see
    :class:`~stateline.layers.weights.Weights` for what it cannot see; call :meth:`refresh` then).
    After a change, states of the old weights leave memory, and only states of the new ones are used
    and kept. It is not thread-safe.

    Args:
        model: A language model in evaluation mode.
        every: Tokens between two states that are kept while a text is read.
        memory: Largest number of bytes in memory. The least recently used states leave it.
        folder: Where states that leave memory are written, for this and other processes; by
            default they are lost. A damaged file counts as missing. If the folder cannot be written
            later, such as on a full disk, a warning is logged, and they are lost, too.
        disk: Largest number of bytes in the folder; the least recently used are removed.

    Raises:
        InputError: If a limit is not positive, or the folder cannot be made.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> states = PrefixStates(model)
        >>> [states.read(tokens).reused for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2])]
        [0, 3, 0]
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        every: int = PREFILL_CHUNK,
        memory: int = MEMORY,
        folder: str | Path | None = None,
        disk: int = DISK,
    ) -> None:
        if min(every, memory, disk) < 1:
            raise InputError(
                f"every, memory and disk must be positive, got {every}, {memory} and {disk}"
            )
        self.model, self.every, self._memory, self._disk = model, every, memory, disk
        self._decoder = Decoder(model)
        self._identify()
        self._states: OrderedDict[bytes, SessionState] = OrderedDict()
        self._folder = None if folder is None else Path(folder)
        self._files = OrderedDict(_files_in(self._folder)) if self._folder else OrderedDict()
        self.in_memory, self.on_disk = 0, sum(self._files.values())

    def __len__(self) -> int:
        """Number of kept states."""
        return len(self._states.keys() | self._files.keys())

    @torch.inference_mode()
    def refresh(self) -> None:
        """Use and keep only states of the weights that the model has now."""
        self.flush()  # they are right for the old weights, which another process may have
        self._states.clear()
        self.in_memory = 0
        self._decoder.refresh()
        self._identify()

    def _identify(self) -> None:
        self._known = fingerprint(self.model)
        self._start = sha256("".join(self._known.values()).encode()).digest()

    def keys(
        self, tokens: Sequence[int], after: bytes | None = None, salt: str = ""
    ) -> Iterator[bytes]:
        """The hash after each token; with ``after``, the text continues the text of that hash."""
        key = sha256(self._start + salt.encode()).digest() if after is None else after
        for token in tokens:
            key = sha256(key + token.to_bytes(8)).digest()
            yield key

    def read(self, tokens: Sequence[int] | Int[Tensor, "_"], after: bytes | None = None) -> Read:
        """Read a text after its longest kept prefix, and keep states of it.

        Args:
            tokens: At least one token, unless the text continues another.
            after: Hash of a text that is kept, which this one continues.

        Raises:
            InputError: If there is no token or there are several rows, the text of ``after`` is
                not kept, a token is outside the vocabulary, or the text is too long for a model
                with learned positions.
        """
        reading = self.pieces(tokens, after)
        try:
            while True:
                next(reading)
        except StopIteration as end:
            found: Read = end.value
            return found

    @torch.inference_mode()
    def pieces(
        self,
        tokens: Sequence[int] | Int[Tensor, "_"],
        after: bytes | None = None,
        salt: str = "",
        most: Callable[[], int] = lambda: PREFILL_CHUNK,
    ) -> Generator[int, None, Read]:
        """As :meth:`read`, but stops after each piece and yields its number of tokens.

        A piece has at most ``most()`` tokens, which are read, or ``HASHED_AT_ONCE``, which are only
        hashed: for these, 0 is yielded. Texts share states only with texts of the same ``salt``.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64, device="cpu")
        if ids.ndim != 1:
            raise InputError(
                f"a text must be tokens of shape (length,), got {tuple(ids.shape)}: read each row "
                "by itself"
            )
        self.model.check_tokens(ids)
        if self._decoder.changed():
            self.refresh()
        weights = self._start
        state = None if after is None else self.find(after)
        before = 0 if state is None else state.length
        keys, kept = yield from self._hash(ids, before, after, salt)
        reused, found = self._longest(kept)
        state = found or state
        done = reused
        if state is None:
            if not len(ids):
                raise InputError("the prompt is empty: give at least one token")
            done, state = 1, first_token(self.model, ids[:1])
            if len(ids) == 1:
                self._keep(keys[1], state)
        while done < len(ids):
            free = self.every - (state.length - 1) % self.every
            piece = ids[done : done + min(free, most())]
            state = extend(self._decoder.ready, state, piece[None])
            if self._decoder.is_stale() or self._start != weights:  # changed since the last piece
                return (yield from self.pieces(tokens, after, salt, most))
            done += len(piece)
            if done in keys:
                self._keep(keys[done], state)
            yield len(piece)
        return Read(state, keys.get(len(ids), after or b""), reused)

    def keep(
        self, key: bytes, state: SessionState, *, now: bool = False, trusted: bool = False
    ) -> None:
        """Keep a state of one row, unless the weights have changed since the last call.

        Args:
            key: Hash of the text.
            state: Its state.
            now: Write it to the folder at once, if there is one.
            trusted: The weights can have changed in ways that PyTorch counts alone.
        """
        if self._decoder.is_stale() if trusted else self._decoder.changed():
            self.refresh()
        else:
            self._keep(key, state, now=now)

    def _keep(self, key: bytes, state: SessionState, *, now: bool = False) -> None:
        if key in self._states:
            self._states.move_to_end(key)
        else:
            self._states[key] = state
            self.in_memory += nbytes(state)
        if now:
            self._write(key)
        while self.in_memory > self._memory:
            oldest = next(iter(self._states))
            self._write(oldest)
            self.in_memory -= nbytes(self._states.pop(oldest))

    def holds(self, key: bytes) -> bool:
        """Whether a state is kept under a hash; its file may still be damaged."""
        return key in self._states or key in self._files

    def get(self, key: bytes) -> SessionState | None:
        """The state that is kept under a hash, in memory or in the folder."""
        if key in self._states:
            self._states.move_to_end(key)
            return self._states[key]
        if key not in self._files:
            return None
        try:
            state = load_kept(self._path(key), self.model, known=self._known).session
        except ForeignState:  # of a named text; its model may come back
            return None
        except InputError as error:
            log.warning("a kept state is not used: %s", error)
            self._remove(key)
            return None
        self._files.move_to_end(key)
        self._path(key).touch()
        self._keep(key, state)
        return state

    def remove(self, key: bytes) -> None:
        """Keep the state under a hash no longer, in memory and in the folder."""
        if key in self._states:
            self.in_memory -= nbytes(self._states.pop(key))
        self._look_for(key)
        if key in self._files:
            self._remove(key)

    def flush(self) -> None:
        """Write all states that are only in memory to the folder, if there is one."""
        for key in self._states:
            self._write(key)

    def find(self, key: bytes) -> SessionState:
        """The state that is kept under a hash.

        Raises:
            InputError: If it is not kept.
        """
        self._look_for(key)
        if (state := self.get(key)) is None:
            raise InputError("the state of the text before is no longer kept: give the whole text")
        return state

    def _hash(
        self, ids: Int[Tensor, " length"], before: int, after: bytes | None, salt: str
    ) -> Generator[int, None, tuple[dict[int, bytes], dict[int, bytes]]]:
        """Hashes by number of tokens: those to keep states under, and those with a kept state."""
        keys, kept, key = dict[int, bytes](), dict[int, bytes](), after
        for first in range(0, len(ids), HASHED_AT_ONCE):
            if first:
                yield 0
            piece = ids[first : first + HASHED_AT_ONCE].tolist()
            for number, link in enumerate(self.keys(piece, key, salt), first + 1):
                if (before + number - 1) % self.every == 0 or number == len(ids):
                    keys[number] = link
                if self.holds(link):
                    kept[number] = link
            key = link
        return keys, kept

    def _longest(self, kept: dict[int, bytes]) -> tuple[int, SessionState | None]:
        """The longest prefix whose state can be read: its number of tokens, and the state."""
        for number, key in reversed(kept.items()):
            if (state := self.get(key)) is not None:
                return number, state
        return 0, None

    def _look_for(self, key: bytes) -> None:
        """Find a state that another process has written since this one read the folder."""
        if self._folder is not None and key not in self._files:
            with suppress(FileNotFoundError):
                self._files[key] = self._path(key).stat().st_size
                self.on_disk += self._files[key]

    def _write(self, key: bytes) -> None:
        if self._folder is None or key in self._files:
            return
        path = self._path(key)
        kept = Kept(self._states[key], NOTHING_HELD)
        try:
            save_state(path, kept, self.model, known=self._known)
        except InputError as error:  # such as a full disk, which ends no text
            log.warning("a kept state is not written: %s", error)
            return
        self._files[key] = path.stat().st_size
        self.on_disk += self._files[key]
        while self.on_disk > self._disk:
            self._remove(next(iter(self._files)))

    def _remove(self, key: bytes) -> None:
        self.on_disk -= self._files.pop(key)
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        assert self._folder is not None
        return self._folder / f"{key.hex()}{_ENDING}"


def _files_in(folder: Path) -> list[tuple[bytes, int]]:
    """Hashes and sizes of the files of a folder, least recently used first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = [(path.stat(), path) for path in folder.glob("[0-9a-f]" * 64 + _ENDING)]
    except (OSError, ValueError) as error:
        raise cannot_write(folder, error) from error
    found.sort(key=lambda entry: entry[0].st_mtime_ns)
    return [(bytes.fromhex(path.stem), entry.st_size) for entry, path in found]
