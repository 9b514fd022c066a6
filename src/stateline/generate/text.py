"""From tokens to text: no half character and no part of a stop string is returned."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data import Decoder, Tokenizer
from stateline.errors import InputError
from stateline.generate.sampling import Penalties, penalize
from stateline.generate.session import Session
from stateline.generate.speculative import Speculation

_CONTEXT = 32
"""Last tokens from which a decoder continues a text; a character has far fewer tokens."""


class HeldText(NamedTuple):
    """All that an interrupted text needs to continue.

    Attributes:
        tokens: Its last tokens.
        text: Text in UTF-8 that was held back since it may be the beginning of a stop string.
    """

    tokens: Int[Tensor, "1 tokens"]
    text: Int[Tensor, "1 bytes"]


NOTHING_HELD = HeldText(*torch.zeros(2, 1, 0, dtype=torch.int64))


class TextStream:
    r"""Turns tokens into text, and returns it as soon as no later token can change it.

    A stop string may begin and end inside of tokens. If there are several, the one that is
    complete first ends the text. End tokens end it, too. Special tokens have no text.

    Args:
        tokenizer: Tokenizer of the model.
        stop: Strings before which the text ends, or one such string.
        held: State of an interrupted text, from :meth:`hold`.
        after: Tokens of the prompt; see :func:`decoder_after`.
        ends: Tokens that end the text; by default the tokenizer's.
        least: Number of tokens before which nothing ends the text.
        special: Whether special tokens are shown.

    Attributes:
        stopped: Whether a stop string or an end token has ended the text.

    Raises:
        InputError: If a stop string is empty, or an interrupted text is of another tokenizer.

    Example:
        >>> from stateline.data import ByteTokenizer
        >>> text = TextStream(ByteTokenizer(), ["\n\n"])
        >>> [text.push(token) for token in b"a\nb\n\nc"], text.stopped
        (['a', '', '\nb', '', '', ''], True)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        held: HeldText | None = None,
        *,
        after: Sequence[int] = (),
        ends: Collection[int] | None = None,
        least: int = 0,
        special: bool = False,
    ) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise InputError("a stop string must not be empty: give at least one character")
        self.stopped = False
        self._decoder, self._text = decoder_after(tokenizer, after), ""
        self._ends = tokenizer.end_tokens if ends is None else ends
        self._silent = () if special else tokenizer.special_tokens
        self._least = least
        self._recent: deque[int] = deque(after, maxlen=_CONTEXT)
        if held is not None:
            self._continue(held, max(tokenizer.vocab_size, tokenizer.padded_size))

    def push(self, token: int) -> str:
        """Text that is certain with this token; empty after the end."""
        if self.stopped:
            return ""
        self._least -= 1
        if token in self._ends and self._least < 0:
            rest, self.stopped = self.finish(), True
            return rest
        if token in self._silent:
            return ""
        self._recent.append(token)
        return self._take(self._decoder.push(token))

    def finish(self) -> str:
        """Text that was held back, when no token follows."""
        if self.stopped:
            return ""
        certain = self._take(self._decoder.finish())
        rest, self._text = self._text, ""
        return certain + rest

    def hold(self) -> HeldText:
        """All that another stream needs to continue this one; not after :meth:`finish`."""
        text = list(self._text.encode(errors="surrogatepass"))
        return HeldText(
            torch.tensor([list(self._recent)], dtype=torch.int64, device="cpu"),
            torch.tensor([text], dtype=torch.int64, device="cpu"),
        )

    def _continue(self, held: HeldText, vocab_size: int) -> None:
        tokens = held.tokens[0].tolist()
        if max(tokens, default=0) >= vocab_size:
            raise InputError(
                f"the interrupted text has the token {max(tokens)}, but the tokenizer only "
                f"{vocab_size}: give the tokenizer that it was made with"
            )
        for token in tokens:
            self._recent.append(token)
            self._decoder.push(token)
        try:
            self._text = bytes(held.text[0].tolist()).decode(errors="surrogatepass")
        except ValueError as error:
            raise InputError(f"the interrupted text is damaged: {error}; save it again") from error

    def _take(self, new: str) -> str:
        if self._least >= 0:
            return new
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


def decoder_after(tokenizer: Tokenizer, tokens: Sequence[int]) -> Decoder:
    """A decoder for a text that follows tokens.

    Tokenizers of SentencePiece leave out the space before the first word of a text. In a text that
    goes on, this space separates its words from the prompt.
    """
    decoder = tokenizer.decoder()
    for token in tokens[-_CONTEXT:]:
        decoder.push(token)
    decoder.finish()
    return decoder


class DecodedToken(NamedTuple):
    """A token of one row, its log-probability in nats, and the text that is certain with it."""

    row: int
    token: int
    log_prob: float
    text: str


def decode_text(
    session: Session | Speculation,
    texts: Sequence[TextStream],
    max_new_tokens: int,
    penalties: Sequence[Penalties] = (),
) -> Iterator[DecodedToken]:
    """Continue a batch of texts; a row whose text ends leaves the batch.

    Args:
        session: Has one row per text, in the same order.
        texts: Streams that turn tokens into text; the caller gets the rest of each by ``finish``.
        max_new_tokens: Largest number of tokens per row.
        penalties: Of each row, which count its tokens; not with a speculation.

    Yields:
        Tokens step by step, in the order of the rows.

    Raises:
        InputError: If the model gives NaN.
    """
    rows = list(range(len(texts)))
    for _ in range(max_new_tokens):
        if penalties:
            assert isinstance(session, Session)
            choice = session.step(adjust=partial(penalize, [penalties[row] for row in rows]))
        else:
            choice = session.step()
        session.check()
        numbers, log_probs = choice.tokens.tolist(), choice.log_probs.tolist()
        for row, token, log_prob in zip(rows, numbers, log_probs, strict=True):
            if penalties:
                penalties[row].counts[token] += 1
            yield DecodedToken(row, token, log_prob, texts[row].push(token))
        active = [place for place, row in enumerate(rows) if not texts[row].stopped]
        if not active:
            return
        if len(active) < len(rows):
            assert isinstance(session, Session)  # a speculation has one row
            session.select(active)
            rows = [rows[place] for place in active]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that is a proper beginning of a stop string.

    Example:
        >>> _overlap("to be", "being")
        2
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if stop.startswith(text[-n:])), 0)
