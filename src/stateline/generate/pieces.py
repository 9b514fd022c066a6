"""Texts of any length, read piece by piece: no more than a piece is in memory."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate.session import SessionState, begin, read
from stateline.models.language_model import LanguageModel

PIECE = 1 << 16
"""Bytes that are read at a time."""

_BORDER = re.compile(r".*\S(?=\s\S)", flags=re.DOTALL)


def token_pieces(
    read_bytes: Callable[[int], bytes], tokenizer: Tokenizer, *, size: int = PIECE
) -> Iterator[Int[Tensor, " length"]]:
    """The tokens of a text in UTF-8, in pieces.

    Pieces end before a single space between two words, where byte pairs never reach across, so
    that the tokens are those of the whole text. Only a text without such a place in a piece is cut
    elsewhere; for tokens of bytes or characters that makes no difference either.

    Args:
        read_bytes: Gives the next bytes, at most so many; none at the end. A file's ``read``.
        tokenizer: Of the model.
        size: Bytes to read at a time.

    Example:
        >>> import io
        >>> from stateline.data import ByteTokenizer
        >>> file = io.BytesIO(b"to be or not")
        >>> [len(piece) for piece in token_pieces(file.read, ByteTokenizer(), size=7)]
        [5, 3, 4]
    """
    decoder, text = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape"), ""
    while data := read_bytes(size):
        text += decoder.decode(data)
        border = _BORDER.match(text)
        cut = border.end() if border else len(text)
        yield torch.from_numpy(tokenizer.encode(text[:cut]))
        text = text[cut:]
    yield torch.from_numpy(tokenizer.encode(text + decoder.decode(b"", final=True)))


def read_pieces(
    model: LanguageModel,
    pieces: Iterable[Int[Tensor, "_"]],
    state: SessionState | None = None,
    *,
    seed: int = 0,
) -> SessionState:
    """Read one text that comes in pieces, from its beginning or on from a kept state.

    Args:
        model: A language model in evaluation mode.
        pieces: Tokens; a piece may be empty.
        state: Of one row; its seed stays.
        seed: Of the random choices of a new text.

    Returns:
        The state after the text, whose last token is not yet fed.

    Raises:
        InputError: If there is neither a token nor a state; further as :func:`begin`.
    """
    for piece in pieces:
        if state is not None:
            state = read(model, state, piece[None])
        elif len(piece):
            state = begin(model, piece[None], seed=seed)
    if state is None:
        raise InputError("the prompt is empty: give at least one token")
    return state
