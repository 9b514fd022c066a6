"""Texts of any length, read in chunks: only one chunk is in memory at a time."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate.session import SessionState, extend, prefill
from stateline.models.language_model import LanguageModel

CHUNK_BYTES = 1 << 16
"""Bytes that are read at a time."""

_BORDER = re.compile(r".*\S(?=\s\S)", flags=re.DOTALL)


def token_chunks(
    read_bytes: Callable[[int], bytes], tokenizer: Tokenizer, *, size: int = CHUNK_BYTES
) -> Iterator[Int[Tensor, " length"]]:
    """Tokens of a text in UTF-8, in chunks.

    A chunk ends before a single space between two words. No byte pair crosses such a place, so the
    tokens are the same as of the whole text. If a chunk has no such place it is cut at its end,
    which can change tokens of byte pairs, but not tokens of bytes or characters.

    Args:
        read_bytes: Returns at most the given number of next bytes, none at the end, such as a
            file's ``read``.
        tokenizer: Tokenizer of the model.
        size: Bytes to read at a time.

    Example:
        >>> import io
        >>> from stateline.data import ByteTokenizer
        >>> file = io.BytesIO(b"to be or not")
        >>> [len(chunk) for chunk in token_chunks(file.read, ByteTokenizer(), size=7)]
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


def prefill_chunks(
    model: LanguageModel,
    chunks: Iterable[Int[Tensor, "_"]],
    state: SessionState | None = None,
    *,
    seed: int = 0,
) -> SessionState:
    """Read one text that comes in chunks, from its beginning or from a kept state.

    Args:
        model: A language model in evaluation mode.
        chunks: Tokens; a chunk may be empty.
        state: A state of one row, which keeps its seed.
        seed: Seed of the random choices of a new text.

    Returns:
        The state after the text, whose last token is not yet fed.

    Raises:
        InputError: If there is neither a token nor a state; otherwise as :func:`prefill`.
    """
    for chunk in chunks:
        if state is not None:
            state = extend(model, state, chunk[None])
        elif len(chunk):
            state = prefill(model, chunk[None], seed=seed)
    if state is None:
        raise InputError("the prompt is empty: give at least one token")
    return state
