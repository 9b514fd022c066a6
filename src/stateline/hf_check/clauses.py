"""Clauses: each reads the same text in another way and measures the difference."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.errors import one_line
from stateline.hf_check.subject import Cache, Subject

PADDING = 5
"""Padding tokens before a text."""

CALLS = {
    "whole": "whole texts",
    "steps": "single steps",
    "chunks": "continuation by several tokens",
    "padding": "left padding",
    "padded chunks": "left padding, then several tokens",
    "copies": "copies of a cache",
    "beams": "beam search",
    "rollback": "taking tokens back",
    "packed": "packed rows",
}
"""Kinds of calls, and their names for readers."""


class NotOffered(Exception):
    """The model says that it cannot do this."""


class Trial:
    """A model, a random text of two rows, and the ways to read it."""

    def __init__(self, subject: Subject, ids: Int[Tensor, "2 length"]) -> None:
        self.subject, self.ids = subject, ids
        self.length = ids.shape[1]
        self.half = self.length // 2
        self.rest = [1] * (self.length - self.half)  # single steps over the second half
        self.steps, self.odd = [self.half, *self.rest], [13, 1, 7, self.length - 21]

    @cached_property
    def wanted(self) -> Float[Tensor, "2 length vocab"]:
        """The reference: logits of one call over the whole text."""
        return self.subject.whole(self.ids)

    def effect_of_the_past(self) -> float:
        """The control: how much other tokens in the first half change logits of the second."""
        half = self.half
        other = self.ids.clone()
        other[:, :half] = self._other(other[:, :half], 11)
        return relative(self.subject.whole(other)[:, half:], self.wanted[:, half:])

    def pieces(self, sizes: Sequence[int], rows: int = 2) -> float:
        """The first rows of the text in calls of these sizes."""
        logits, _ = self.subject.run(self.ids[:rows], sizes)
        return relative(logits, self.wanted[:rows, : sum(sizes)])

    def padded(self) -> float:
        """One call over padded rows."""
        ids, mask = self._left_padded()
        return relative(self.subject.whole(ids, mask)[:, PADDING:], self.wanted)

    def padded_pieces(self, sizes: Sequence[int]) -> float:
        """Padded rows in calls of these sizes; the first call also reads the padding."""
        ids, mask = self._left_padded()
        first, *others = sizes
        logits, _ = self.subject.run(ids, [first + PADDING, *others], mask=mask)
        return relative(logits[:, PADDING:], self.wanted)

    def ragged_steps(self) -> float:
        """A short padded row beside a full one, then single steps."""
        ids, mask = self._ragged(self.ids)
        logits, _ = self.subject.run(ids, self.steps, mask=mask)
        short = self.subject.whole(self.ids[:1, PADDING:])
        return max(relative(logits[:1, PADDING:], short), relative(logits[1:], self.wanted[1:]))

    def rows_alone(self) -> float:
        """Each row in a call of its own."""
        rows = [self.subject.whole(self.ids[row : row + 1]) for row in range(len(self.ids))]
        return relative(torch.cat(rows), self.wanted)

    def causality(self) -> float:
        """Logits before a token that changes."""
        other = self.ids.clone()
        other[:, self.half] = self._other(other[:, self.half], 7)
        return relative(self.subject.whole(other)[:, : self.half], self.wanted[:, : self.half])

    def copied_cache(self) -> float:
        """A deep copy of a cache, used after the original has read another text."""
        _, cache = self.subject.run(self.ids, [self.half])
        kept = copy.deepcopy(cache)
        self.subject.run(self._other(self.ids, 3), self.rest, cache, start=self.half)
        return self._rest(self.ids, kept)

    def reordered_rows(self) -> float:
        """Rows of a cache reordered, as beam search does."""
        _, cache = self.subject.run(self.ids, [self.half])
        rows = torch.arange(len(self.ids), device=self.ids.device).flip(0)
        if hasattr(self.subject.model, "_reorder_cache"):
            cache = Cache(cache.name, self.subject.model._reorder_cache(cache.value, rows))
        else:
            cache.value.reorder_cache(rows)
        logits, _ = self.subject.run(self.ids[rows], self.rest, cache, start=self.half)
        return relative(logits, self.wanted[rows, self.half :])

    def rollback(self) -> float:
        """Three wrong tokens read and taken back, as assisted decoding does."""
        _, cache = self.subject.run(self.ids, [self.half])
        if not getattr(cache.value, "is_croppable", False):
            raise NotOffered("its cache cannot be cropped")
        cache.value.activate_past_recording()
        self.subject.run(self._other(self.ids, 3), [3], cache, start=self.half)
        cache.value.crop(-3)
        return self._rest(self.ids, cache)

    def packed(self, *, borders: bool = False) -> float:
        """Three texts in one row, as trainers pass them: each must be read as if it stood alone.

        Args:
            borders: Pass not only positions, but also ``cu_seq_lens_q``, ``cu_seq_lens_k``, their
                largest lengths and ``seq_idx``.
        """
        texts = [self.ids[:1, :13], self.ids[1:, : self.half], self.ids[:1, 13:]]
        lengths = torch.tensor([text.shape[1] for text in texts], device=self.ids.device)
        positions = torch.cat([torch.arange(n, device=self.ids.device) for n in lengths])
        given: dict[str, Any] = {"position_ids": positions[None]}
        if borders:
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            most, number = int(lengths.max()), torch.arange(len(texts), device=ends.device).int()
            given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            given |= {"max_length_q": most, "max_length_k": most}
            given["seq_idx"] = number.repeat_interleave(lengths)[None]
        try:
            logits = self.subject.whole(torch.cat(texts, dim=1), **given)
        except Exception as reason:  # a refusal, which gives no wrong logits
            raise NotOffered(one_line(reason)[:120]) from reason
        parts = logits.split(lengths.tolist(), dim=1)
        pairs = zip(parts, texts, strict=True)
        return max(relative(part, self.subject.whole(text)) for part, text in pairs)

    def generated(self, **settings: Any) -> float:
        """Tokens of ``generate`` that differ with and without a cache."""
        prompt = self.ids[:, : self.half]
        with_cache, without = (
            self._generate(prompt, torch.ones_like(prompt), use_cache=use_cache, **settings)
            for use_cache in (True, False)
        )
        return _wrong_tokens(with_cache, without)

    def generated_padded(self) -> float:
        """Tokens of ``generate`` that differ between a padded batch and a single row."""
        ids, mask = self._ragged(self.ids[:, : self.half])
        alone = self.ids[:1, PADDING : self.half]
        found = self._generate(ids, mask)[:1, self.half :]
        wanted = self._generate(alone, torch.ones_like(alone))[:, self.half - PADDING :]
        return _wrong_tokens(found, wanted)

    def _generate(self, ids: Tensor, mask: Tensor, **settings: Any) -> Tensor:
        given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **settings}
        return self.subject.model.generate(ids, attention_mask=mask, **given)

    def _rest(self, ids: Tensor, cache: Cache) -> float:
        logits, _ = self.subject.run(ids, self.rest, cache, start=self.half)
        return relative(logits, self.wanted[:, self.half :])

    def _other(self, ids: Tensor, by: int) -> Tensor:
        return (ids + by) % self.subject.vocab_size

    def _left_padded(self) -> tuple[Tensor, Tensor]:
        """The text after padding, and its mask."""
        ids = torch.nn.functional.pad(self.ids, (PADDING, 0))
        mask = torch.ones_like(ids)
        mask[:, :PADDING] = 0
        return ids, mask

    def _ragged(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The first tokens of the first row as padding, and the mask."""
        ids, mask = ids.clone(), torch.ones_like(ids)
        ids[0, :PADDING], mask[0, :PADDING] = 0, 0
        return ids, mask


class Clause(NamedTuple):
    """A clause: what kind of call it is about, what it compares, and how.

    Attributes:
        call: A key of ``CALLS``.
        title: Name of the calls that are compared with one call over the whole text.
        measure: Gives the error.
        plain: Whether it is also measured with plain calls.
        training: Whether it is about calls that only trainers make, not ``generate``.
    """

    call: str
    title: str
    measure: Callable[[Trial], float]
    plain: bool = False
    training: bool = False


CLAUSES = (
    Clause("whole", "rows alone", Trial.rows_alone),
    Clause("whole", "no later token is seen", Trial.causality),
    Clause("steps", "prefill, then steps", lambda t: t.pieces(t.steps), plain=True),
    Clause("steps", "steps from the start", lambda t: t.pieces([1] * t.length), plain=True),
    Clause("steps", "2 tokens, then steps", lambda t: t.pieces([2, *[1] * 10]), plain=True),
    Clause("steps", "one row: prefill, then steps", lambda t: t.pieces(t.steps, 1), plain=True),
    Clause("steps", "generate with and without cache", Trial.generated),
    Clause("chunks", "chunks of 8", lambda t: t.pieces([8] * (t.length // 8)), plain=True),
    Clause("chunks", "chunks of 13, 1, 7 and the rest", lambda t: t.pieces(t.odd), plain=True),
    Clause(
        "padded chunks", "left padding, then chunks", lambda t: t.padded_pieces(t.odd), plain=True
    ),
    Clause("padding", "left padding", Trial.padded, plain=True),
    Clause("padding", "left padding, then steps", lambda t: t.padded_pieces(t.steps), plain=True),
    Clause("padding", "ragged rows, then steps", Trial.ragged_steps, plain=True),
    Clause("padding", "generate in a padded batch", Trial.generated_padded),
    Clause("copies", "a copied cache is independent", Trial.copied_cache),
    Clause("beams", "reordered rows", Trial.reordered_rows),
    Clause("beams", "generate with 3 beams", lambda t: t.generated(num_beams=3)),
    Clause("rollback", "3 tokens taken back", Trial.rollback),
    Clause("packed", "packed: positions alone", Trial.packed, training=True),
    Clause("packed", "packed: with borders", lambda t: t.packed(borders=True), training=True),
)
"""All clauses. Errors are relative to the largest logit; for ``generate``, numbers of tokens."""


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest entry; NaN counts as infinitely wrong."""
    error = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
    return float("inf") if error.isnan() else float(error)


def _wrong_tokens(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found != wanted).sum())
