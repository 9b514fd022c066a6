"""Mixture: predict the next token of several texts, each with its share of every batch."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import TypeVar

import torch

from stateline.data.corpus import INDEX
from stateline.errors import InputError
from stateline.files import user_path
from stateline.settings import Count, Size
from stateline.tasks.base import Batch, ConsecutiveBatch, CorpusTask, PackedBatch, train_settings
from stateline.tasks.text.corpus import Documents, LongTextTask, eval_lengths
from stateline.tasks.text.text import Text
from stateline.tasks.text.tokens import Tokens

AnyBatch = TypeVar("AnyBatch", Batch | PackedBatch, ConsecutiveBatch | PackedBatch)


@dataclass(eq=False, kw_only=True)
class Mixture(CorpusTask):
    """Predict the next token of several texts, each with a fixed share of the rows of every batch.

    The texts are read as the tasks :class:`~stateline.tasks.Tokens` (a folder that ``stateline
    data`` has written) and :class:`~stateline.tasks.Text` (other files and folders) read them; they
    must have one tokenizer. Scores are those of each text, and their mean by the shares.

    Args:
        seed: Fixes every batch.
        texts: ``PATH:WEIGHT`` of each text, separated by spaces; weights are whole numbers.
        length: Tokens in a training window.
        batch_size: Windows in a training batch, a multiple of the sum of the weights.
        documents, longest, carried: See :class:`~stateline.tasks.LongTextTask`.

    Raises:
        InputError: If a text cannot be read, the tokenizers differ, a weight is no whole number,
            or ``batch_size`` cannot be divided.

    Example:
        >>> import sysconfig
        >>> library = sysconfig.get_path("stdlib")
        >>> task = Mixture(texts=f"{library}/ast.py:3 {library}/json:1", length=64)
        >>> [part.batch_size for part in task.parts], task.train_batch(0).tokens.shape
        ([12, 4], torch.Size([16, 64]))
    """

    title = "Several texts"
    about = (
        "Bits per byte on the held-out part of each text, and their mean by the shares in "
        "training. Scores compare only between runs on the same texts."
    )
    metric = "bits_per_byte"
    higher_is_better = False
    training = train_settings(steps=600, lr=4e-3, schedule="cosine")
    seed: Size = field(default=0, kw_only=False)
    texts: str = ""
    length: Count = 256
    batch_size: Count = 16
    documents: Documents = "join"
    longest: int | None = None
    carried: bool = False

    def __post_init__(self) -> None:
        weights = dict(map(_weighted, self.texts.split()))
        if len(weights) < 2:
            raise InputError(
                "mixture needs texts of two or more paths with their weights, such as "
                f"mixture(texts='books:3 code:1'), got {self.texts!r}"
            )
        divisor = reduce(math.gcd, weights.values())
        whole = sum(weights.values()) // divisor
        if self.batch_size % whole:
            raise InputError(
                f"batch_size must be a multiple of {whole}, the sum of the weights, got "
                f"{self.batch_size}: take {max(1, round(self.batch_size / whole)) * whole}"
            )
        rows = self.batch_size // whole
        self.parts = [self._part(path, rows * n // divisor) for path, n in weights.items()]
        self.names = _names(list(weights))
        self.shares = [part.batch_size / self.batch_size for part in self.parts]
        first = self.parts[0]
        self.tokenizer, self.vocab_size = first.tokenizer, first.vocab_size
        if len({part.tokenizer.to_json() for part in self.parts}) > 1:
            raise InputError(
                "the texts of a mixture must have one tokenizer: make their corpora with "
                "stateline data and the same --tokenizer"
            )
        self.train_length, self.eval_lengths = self.length, eval_lengths(self.length, self.longest)
        sizes = [len(part._held_out) for part in self.parts]
        n_bytes = sum(n * part.bytes_per_token for n, part in zip(sizes, self.parts, strict=True))
        self.bytes_per_token = n_bytes / sum(sizes)

    def _part(self, path: str, rows: int) -> LongTextTask:
        options = {name: getattr(self, name) for name in ("length", "documents", "longest")}
        kind = Tokens if (user_path(path, "text") / INDEX).exists() else Text
        return kind(self.seed, path=path, batch_size=rows, carried=self.carried, **options)

    def train_batch(self, index: int) -> Batch | PackedBatch:
        """Training batch number ``index``: the rows of each text, one text after the other."""
        return _joined([part.train_batch(index) for part in self.parts])

    def consecutive_batch(self, index: int) -> ConsecutiveBatch | PackedBatch:
        """Training batch number ``index``; each row continues its text."""
        return _joined([part.consecutive_batch(index) for part in self.parts])

    def held_out(self, length: int) -> Iterator[Batch | PackedBatch]:
        """The held-out parts of all texts once, in windows of ``length`` tokens."""
        return chain.from_iterable(part.held_out(length) for part in self.parts)

    def hold_out_validation(self) -> str:
        """Score a part of each training text that is held out."""
        return "; ".join(part.hold_out_validation() for part in self.parts)

    def score_names(self) -> set[str]:
        """The metric, and that of each text."""
        return {self.metric, *map(self.score_name, self.names)}

    def score_name(self, name: str) -> str:
        """Name of the score on one text."""
        return f"{self.metric}_{name}"

    def baselines(self) -> Mapping[str, float]:
        """Means by the shares of what gzip and xz need."""
        found = [part.baselines() for part in self.parts]
        return {name: self.mean([own[name] for own in found]) for name in found[0]}

    def mean(self, scores: list[float]) -> float:
        """The mean of the texts' scores by their shares."""
        return sum(share * score for share, score in zip(self.shares, scores, strict=True))

    def describe(self) -> Mapping[str, object]:
        """Share, source, sizes and hash of each text."""
        facts = [dict(part.describe()) for part in self.parts]
        sums = "".join(str(own["sha256"]) for own in facts)
        each = zip(self.names, self.shares, facts, strict=True)
        texts = {name: {"share": share, **own} for name, share, own in each}
        return {"sha256": hashlib.sha256(sums.encode()).hexdigest(), **texts}


def _weighted(word: str) -> tuple[str, int]:
    """The path and the weight in one word."""
    path, _, weight = word.rpartition(":")
    if not path or not weight.isdecimal() or not int(weight):
        raise InputError(
            f"a text of a mixture is PATH:WEIGHT with a whole number above 0, got {word!r}"
        )
    return path, int(weight)


def _names(paths: list[str]) -> list[str]:
    """A short name of each path: its last part, or all of it if two share that."""
    short = [user_path(path, "text").stem for path in paths]
    return short if len({*short}) == len(short) else paths


def _joined(batches: list[AnyBatch]) -> AnyBatch:
    """One batch of the rows of all."""
    kind = type(batches[0])
    return kind(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
