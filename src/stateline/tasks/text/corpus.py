"""Windows of a long text: at random places, consecutive, or all of them once."""

import gzip
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from stateline.data.token_text import TokenText
from stateline.data.tokenizer import utf8
from stateline.errors import InputError
from stateline.settings import Count, Size, at_least
from stateline.tasks.base import (
    Batch,
    ConsecutiveBatch,
    CorpusTask,
    PackedBatch,
    epoch_rows,
    generator,
    train_settings,
)
from stateline.tasks.text.windows import Numbers, PackedRows, Segments, Stream, windows

TOKENS_PER_BATCH = 16_384
"""Approximate number of tokens in a batch of the held-out text."""

Documents = Literal["join", "separate", "pack"]


class TextTask(CorpusTask):
    """A task on two token sequences, one to train on and one to score.

    A row holds tokens of one document, unless rows are packed. A task that joins documents passes a
    text that has a single document.

    Attributes:
        documents: Whether rows are windows of documents, or packed with several documents.
        carried: Whether the held-out text is scored in rows whose state is carried from window to
            window, instead of in windows that each begin with an empty state.
    """

    metric = "bits_per_byte"
    higher_is_better = False
    training = train_settings(steps=600, lr=4e-3, schedule="cosine")
    documents: Documents = "join"
    carried: bool = False
    seed: Size
    _training: TokenText
    _held_out: TokenText
    _epoch: tuple[int, Segments | Stream, int] | None = None
    """The epoch that was read last: its number, its rows, and the first row to read."""

    def train_batch(self, index: int) -> Batch | PackedBatch:
        """Training batch number ``index``: windows at random places, or packed rows.

        For a window, a document is drawn in proportion to its length, then a place in it. Packed
        rows are shuffled in every epoch; the incomplete last batch is skipped.
        """
        if self.documents == "pack":
            return self._shuffled(index)
        rng, text, length = generator(self.seed, "train", index), self._training, self.train_length
        begins, ends = text.borders[:-1], text.borders[1:]
        if len(begins) == 1:
            starts = rng.integers(len(text) - length, size=self.batch_size)
            return windows(text, starts, starts + length, length)
        targets = self._targets_before
        drawn = np.searchsorted(targets, rng.integers(targets[-1], size=self.batch_size), "right")
        starts = begins[drawn] + rng.integers(np.maximum(ends - begins - length, 1)[drawn])
        return windows(text, starts, np.minimum(starts + length, ends[drawn] - 1), length)

    def _shuffled(self, index: int) -> Batch | PackedBatch:
        """Rows that each begin with an empty state, in the order of the epoch."""
        numbers = epoch_rows(self.seed, len(self._rows), self.batch_size, index)
        return self._rows.read(self._training, numbers)

    @cached_property
    def _rows(self) -> Segments | PackedRows:
        rows = self._rows_of(self._training, self.train_length)
        if len(rows) < self.batch_size:
            raise InputError(
                f"packed rows of length={self.train_length} must be at least "
                f"batch_size={self.batch_size}, got {len(rows)}: give more text, or lower length "
                "or batch_size"
            )
        return rows

    def _rows_of(self, text: TokenText, length: int) -> Segments | PackedRows:
        segments = Segments(text.borders[:-1], text.borders[1:], length)
        return PackedRows(segments) if self.documents == "pack" else segments

    @cached_property
    def _targets_before(self) -> Numbers:
        """Cumulative number of targets up to the end of each document."""
        return np.cumsum(np.maximum(np.diff(self._training.borders) - 1, 0))

    def consecutive_batch(self, index: int) -> ConsecutiveBatch | PackedBatch:
        """Training batch number ``index``; it continues the rows of the previous one.

        The text is cut into segments of the training length, and each row reads consecutive
        segments. When all are read, a new epoch begins: every row starts from an empty state, and
        the segments differ. A single document is cut at other places. Several documents come in
        another order, and each begins a segment; packed documents follow each other without gaps.

        Raises:
            InputError: If the text is too short for a segment per row.
        """
        count = self._batches_per_epoch
        epoch, step = divmod(index, count)
        if self._epoch is None or self._epoch[0] != epoch:
            rng = generator(self.seed, "epoch", epoch)
            rows = self._consecutive_rows(rng)
            first = int(rng.integers(rows.full - self.batch_size * count + 1))
            self._epoch = epoch, rows, first
        _, rows, first = self._epoch
        numbers = first + np.arange(self.batch_size) * count + step
        return rows.read_on(self._training, numbers, begun=step == 0)

    @cached_property
    def _batches_per_epoch(self) -> int:
        segments = self._consecutive_rows(None).full
        if segments < self.batch_size:
            raise InputError(
                f"consecutive batches need a segment of length={self.train_length} for each of "
                f"batch_size={self.batch_size} rows, got text for {segments}: give more text, or "
                "lower length or batch_size"
            )
        return segments // self.batch_size

    def _consecutive_rows(self, rng: np.random.Generator | None) -> Segments | Stream:
        """The training text in consecutive rows; without ``rng``, cut into the fewest rows."""
        begins, ends = self._training.borders[:-1], self._training.borders[1:]
        if len(begins) == 1 and self.documents != "pack":
            last = self.train_length - 1  # cutting from there gives the fewest
            begins = begins + (last if rng is None else rng.integers(self.train_length))
        elif rng is not None:
            order = rng.permutation(len(begins))
            begins, ends = begins[order], ends[order]
        kind = Stream if self.documents == "pack" else Segments
        return kind(begins, ends, self.train_length)

    def held_out(self, length: int) -> Iterator[Batch | PackedBatch]:
        """The held-out text once, in windows of ``length``, about 16,000 tokens per batch.

        Every token of a document but the first is a target once. Each window is read from an empty
        state, so longer windows give better scores. Short windows are padded with ``IGNORE``, or
        packed.
        """
        at_least(1, length=length)
        rows, size = self._rows_of(self._held_out, length), max(1, TOKENS_PER_BATCH // length)
        runs = (np.arange(n, min(n + size, len(rows))) for n in range(0, len(rows), size))
        return (rows.read(self._held_out, numbers) for numbers in runs)

    def held_out_rows(self, length: int) -> Iterator[ConsecutiveBatch | PackedBatch]:
        """The held-out text once; each batch continues ``batch_size`` rows by ``length`` tokens.

        The first batch, and each document, begin with an empty state.
        """
        borders, kind = self._held_out.borders, Stream if self.documents == "pack" else Segments
        rows = kind(borders[:-1], borders[1:], length)
        count = min(self.batch_size, len(rows))
        steps = -(-len(rows) // count)
        for step in range(steps):
            numbers = np.arange(count) * steps + step
            yield rows.read_on(self._held_out, numbers, begun=step == 0)

    def hold_out_validation(self) -> str:
        """Score the last tenth of the training text, at most as many tokens as are held out.

        Bits are divided by the bytes per token of the held-out text, so these scores compare only
        with each other.
        """
        text = self._training
        count = min(len(text) // 10, len(self._held_out))
        if count < 2 or len(text) - count <= self.train_length:
            raise InputError(
                f"choosing settings needs {max(20, 2 * self.train_length)} tokens to train on, a "
                f"tenth of them to hold out, got {len(text)}: give more text or use the protocol "
                "quick"
            )
        place = len(text) - count
        self._training, self._held_out = text.cut(place), text.after(place)
        return f"the last {count:,} of {len(text):,} training tokens, held out from training"

    def baselines(self) -> Mapping[str, float]:
        """Bits per byte of gzip and xz at their highest level on the held-out text.

        Tokens between documents have a name, which is compressed, but no bytes in the text.
        """
        text = utf8(self.tokenizer.decode(self._held_out.read(0, len(self._held_out))))
        n_bytes = self.bytes_per_token * len(self._held_out)
        packed = {
            "gzip": gzip.compress(text, compresslevel=9, mtime=0),
            "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),
        }
        return {name: 8 * len(result) / n_bytes for name, result in packed.items()}


@dataclass(eq=False, kw_only=True)
class LongTextTask(TextTask):
    """A task on a long text, or on many documents.

    Args:
        seed: Fixes every batch; what is held out does not depend on it.
        length: Tokens in a training window.
        batch_size: Windows in a training batch.
        documents: ``"join"`` reads the documents as one long text. With ``"separate"``, windows end
            with their document, and carried state is reset at the start of each document. With
            ``"pack"``, the same holds, but a row has several documents or parts of them, so that
            few positions are empty: best fit packs them, or with carried state they follow each
            other.
        longest: Score at ``length``, at its doublings up to this length, and at this length; by
            default at ``length`` and four times ``length``.
        carried: Score the held-out text in ``batch_size`` rows with carried state, as models with a
            memory are scored, instead of in windows that each begin with an empty state.
    """

    seed: Size = field(default=0, kw_only=False)
    length: Count = 256
    batch_size: Count = 16
    documents: Documents = "join"
    longest: int | None = None
    carried: bool = False

    def __post_init__(self) -> None:
        self.train_length = self.length
        self.eval_lengths = eval_lengths(self.length, self.longest)

    def set_texts(self, training: TokenText, held_out: TokenText, source: str, unit: str) -> None:
        """Keep the text to train on and the text to score.

        Raises:
            InputError: If a window does not fit.
        """
        if self.documents == "join":
            training, held_out = training.joined(), held_out.joined()
        self._training, self._held_out = training, held_out
        windows = np.diff(training.borders)
        needed = self.length + 1 if len(windows) == 1 and self.documents != "pack" else 2
        scored = int(np.diff(held_out.borders).max(initial=0))
        if windows.max() < needed or scored < 2:
            raise InputError(
                f"{source} must give {needed} {unit} in a row to train on and 2 to hold out, got "
                f"{windows.max()} and {scored}: give more text or lower length"
            )


def eval_lengths(length: int, longest: int | None) -> tuple[int, ...]:
    """The training length and four times it; with ``longest``, its doublings and ``longest``.

    Example:
        >>> eval_lengths(256, None), eval_lengths(256, 2000)
        ((256, 1024), (256, 512, 1024, 2000))
    """
    if longest is None:
        return length, 4 * length
    if longest < length:
        raise InputError(
            f"longest must be at least the training length, got longest={longest} and "
            f"length={length}"
        )
    doublings = (length << power for power in range((longest // length).bit_length()))
    return tuple(dict.fromkeys((*doublings, longest)))
