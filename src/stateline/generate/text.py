"""From tokens to text as they come: no half character, and nothing of a stop string."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate.session import Session

_CONTEXT = 32
"""Tokens after which a decoder no longer depends on what came before: a character has few."""


class HeldText(NamedTuple):
    """What a text that is interrupted needs to go on: its last tokens, and what nobody has seen.

    The text held back is in UTF-8; it may be the beginning of a stop string.
    """

    tokens: Int[Tensor, "1 tokens"]
    text: Int[Tensor, "1 bytes"]


class TextStream:
    r"""Text of tokens, given out as soon as it is certain.

    A stop string is found wherever the borders of tokens are; of several, the one that is complete
    first ends the text.

    Args:
        tokenizer: Of the tokens.
        stop: Strings before which the text ends.
        held: Where an interrupted text goes on.

    Attributes:
        stopped: Whether the text has ended before a stop string.

    Raises:
        InputError: If a stop string is empty.

    Example:
        >>> from stateline.data import ByteTokenizer
        >>> text = TextStream(ByteTokenizer(), ["\n\n"])
        >>> [text.push(token) for token in b"a\nb\n\nc"], text.stopped
        (['a', '', '\nb', '', '', ''], True)
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), held: HeldText | None = None
    ) -> None:
        if "" in stop:
            raise InputError("a stop string must not be empty: give at least one character")
        self.stopped = False
        self._stop, self._decoder, self._text = tuple(stop), tokenizer.decoder(), ""
        self._recent: deque[int] = deque(maxlen=_CONTEXT)
        if held is not None:
            for token in held.tokens[0].tolist():
                self._recent.append(token)
                self._decoder.push(token)
            self._text = bytes(held.text[0].tolist()).decode(errors="surrogatepass")

    def push(self, token: int) -> str:
        """What is certain with this token; nothing after a stop string."""
        if self.stopped:
            return ""
        self._recent.append(token)
        return self._take(self._decoder.push(token))

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if self.stopped:
            return ""
        certain = self._take(self._decoder.finish())
        rest, self._text = self._text, ""
        return certain + rest

    def hold(self) -> HeldText:
        """What another stream needs to go on after this one; no :func:`finish` before."""
        text = list(self._text.encode(errors="surrogatepass"))
        return HeldText(
            torch.tensor([list(self._recent)], dtype=torch.int64),
            torch.tensor([text], dtype=torch.int64),
        )

    def _take(self, new: str) -> str:
        text = self._text + new
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop]
        complete = [(end, start) for end, start in ends if start >= 0]
        if complete:
            self.stopped, self._text = True, ""
            return text[: min(complete)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        certain = len(text) - held
        self._text = text[certain:]
        return text[:certain]


class Written(NamedTuple):
    """A token of one row, its log-probability, and the text that is certain with it."""

    row: int
    token: int
    log_prob: float
    text: str


def write(session: Session, texts: Sequence[TextStream], max_new_tokens: int) -> Iterator[Written]:
    """Go on with a batch of texts; a row that meets a stop string drops out.

    Args:
        session: Its rows, in the order of the texts; all of them may end early.
        texts: What becomes of the tokens; what they hold back at the end is left to the caller.
        max_new_tokens: Most tokens of a row.

    Yields:
        Tokens as they are known, those of one step in the order of the rows.
    """
    rows = list(range(len(texts)))
    for _ in range(max_new_tokens):
        choice = session.step()
        numbers, log_probs = choice.tokens.tolist(), choice.log_probs.tolist()
        for row, token, log_prob in zip(rows, numbers, log_probs, strict=True):
            yield Written(row, token, log_prob, texts[row].push(token))
        going = [place for place, row in enumerate(rows) if not texts[row].stopped]
        if not going:
            return
        if len(going) < len(rows):
            session.select(going)
            rows = [rows[place] for place in going]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins.

    Example:
        >>> _overlap("to be", "being")
        2
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if stop.startswith(text[-n:])), 0)
