"""Reading: a text of any length in chunks, and rows of different lengths together.

Only one chunk of a text is in memory at a time.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.generate.session_state import PREFILL_CHUNK, SessionState, extend, prefill
from stateline.layers import cat_states, select_rows
from stateline.models.language_model import LanguageModel, LanguageModelState

CHUNK_BYTES = 1 << 16
"""Bytes that are read at a time."""


def token_chunks(
    read_bytes: Callable[[int], bytes],
    tokenizer: Tokenizer,
    *,
    size: int = CHUNK_BYTES,
    begins: bool = False,
) -> Iterator[Int[Tensor, " length"]]:
    """Tokens of a text in UTF-8, in chunks; joined, they are the tokens of the text.

    The tokenizer's ``encode_pieces`` divides the text. Those of Hugging Face keep text in memory
    until there is a space that they can divide it at.

    Args:
        read_bytes: Returns at most the given number of next bytes, and no bytes at the end, like
            the ``read`` of a file.
        tokenizer: Tokenizer of the model.
        size: Bytes to read at a time.
        begins: Whether the tokens that begin a text are added; see ``Tokenizer.prompt``.

    Example:
        >>> import io
        >>> from stateline.data import ByteTokenizer
        >>> file = io.BytesIO(b"to be or not")
        >>> [len(chunk) for chunk in token_chunks(file.read, ByteTokenizer(), size=7)]
        [5, 3, 4]
    """

    def pieces() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        while data := read_bytes(size):
            yield decoder.decode(data)
        if cut := decoder.decode(b"", final=True):  # inside a character
            yield cut

    for number, tokens in enumerate(tokenizer.encode_pieces(pieces())):
        first = begins and number == 0
        yield torch.from_numpy(tokenizer.begin(tokens) if first else tokens)


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


def read_ragged(
    model: LanguageModel,
    rows: Sequence[Int[Tensor, "_"]],
    state: LanguageModelState,
    *,
    keep: int | None = None,
) -> tuple[list[Float[Tensor, "_ vocab"]], LanguageModelState]:
    """Read the next tokens of a batch, a different number in each row.

    The batch is read up to the end of the shortest row; that row is set aside, the others continue,
    and the states are joined at the end. So no layer needs a mask, no padding is computed, and no
    token is read twice; the number of calls is the number of different lengths.

    Args:
        model: A language model.
        rows: Tokens of each row, on the model's device; a row may be empty.
        state: State of as many rows.
        keep: Return logits of at most this many last tokens of each row; by default of all.

    Returns:
        The logits after each token of each row, and the state after all of them.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8))
        >>> rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
        >>> logits, state = read_ragged(model, rows, model.init_state(2))
        >>> [len(row) for row in logits], state.position.tolist()
        ([3, 1], [3, 1])
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    nothing = torch.zeros(0, model.config.vocab_size, dtype=model.dtype, device=model.device)
    pieces: list[list[Tensor]] = [[nothing] for _ in rows]
    state, done, start, active = select_rows(state, order), [], 0, order
    for end in sorted({len(row) for row in rows}):
        for first in range(start, end, PREFILL_CHUNK):
            last = min(first + PREFILL_CHUNK, end)
            tokens = torch.stack([rows[row][first:last] for row in active])
            logits, state = model.forward_chunk(tokens, state, keep=keep)
            for row, found in zip(active, logits, strict=True):
                pieces[row].append(found)
        ended = sum(len(rows[row]) == end for row in active)
        done.append(select_rows(state, range(ended)))
        state = select_rows(state, range(ended, len(active)))
        start, active = end, active[ended:]
    joined = [torch.cat(parts) for parts in pieces]
    kept = [found if keep is None else found[max(0, len(found) - keep) :] for found in joined]
    return kept, select_rows(cat_states(done), torch.tensor(order, device=model.device).argsort())
