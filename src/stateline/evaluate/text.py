"""Scores of a model on texts of any length, one chunk of which is in memory at a time."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from stateline.data import Tokenizer
from stateline.data.tokenizer import utf8
from stateline.errors import InputError
from stateline.evaluate.losses import Buckets, losses_of
from stateline.files import text_file
from stateline.generate import token_chunks
from stateline.generate.session_state import check_model
from stateline.models.inputs import check_axes, warn_beyond_training
from stateline.models.language_model import LanguageModel

CHUNK = 1024
"""Tokens whose logits are in memory at a time."""

LONGEST = 2**31 - 1
"""Largest chunk or window."""

FIRST_BUCKET = 64


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text. The first token is not scored: nothing precedes it.

    In a file it is the token that begins a text, if the tokenizer has one.

    Attributes:
        losses: Losses in nats, by position in the text, or in the window if windows were read.
        n_bytes: Bytes of the scored tokens; 0 if they were not counted.
        seconds: Time that scoring took.
        n_words: Words of the text, separated by white space; 0 if they were not counted.
    """

    losses: Buckets
    n_bytes: int
    seconds: float
    n_words: int = 0

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss in nats per token; may be infinite."""
        return float(torch.tensor(self.losses.mean, dtype=torch.float64, device="cpu").exp())

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of the text, comparable between tokenizers.

        Raises:
            InputError: If bytes were not counted.
        """
        if not self.n_bytes:
            raise InputError(
                "bits per byte need the number of bytes, which score_text does not count: "
                "take score_file, or losses and perplexity"
            )
        return self.losses.mean * self.losses.count / math.log(2) / self.n_bytes

    @property
    def word_perplexity(self) -> float:
        """Exponential of the loss in nats per word of the text, comparable between tokenizers."""
        per_word = self.losses.mean * self.losses.count / max(self.n_words, 1)
        return float(torch.tensor(per_word, dtype=torch.float64, device="cpu").exp())

    @property
    def tokens_per_second(self) -> float:
        """Tokens scored per second."""
        return self.losses.count / self.seconds

    def __add__(self, other: "TextScore") -> "TextScore":
        losses = Buckets(self.losses.first)
        losses.merge(self.losses)
        losses.merge(other.losses)
        sums = (getattr(self, n) + getattr(other, n) for n in ("n_bytes", "seconds", "n_words"))
        return TextScore(losses, *sums)


@torch.inference_mode()
def score_text(
    model: LanguageModel,
    pieces: Iterable[Int[Tensor, "_"]],
    *,
    chunk: int = CHUNK,
    window: int | None = None,
    stride: int | None = None,
) -> TextScore:
    """Score one text, whose tokens may come in chunks of any length.

    The state is carried from chunk to chunk, so each token is predicted from all tokens before it:
    the result equals one forward pass over the whole text. With a ``window``, each window is read
    from an empty state. Windows overlap: every token is predicted from at least ``window - stride``
    tokens, or from all tokens before it if they are fewer.

    Args:
        model: A language model in evaluation mode; it computes on its own device.
        pieces: The tokens in chunks, at least two tokens in all.
        chunk: Tokens read at a time if the state is carried.
        window: Tokens in a window; by default the state is carried.
        stride: Tokens from the beginning of one window to the next; by default half a window.

    Returns:
        The score, without a number of bytes.

    Raises:
        InputError: If there are fewer than two tokens, one is outside the vocabulary, a length is
            out of range, a chunk is not a tensor of one axis, or the window or text has more
            positions than the model has learned.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> model = LanguageModel(ModelConfig("h3", vocab_size=10, d_model=8)).eval()
        >>> score_text(model, torch.arange(10).split(4)).losses.count
        9
    """
    check_model(model)
    step = stride if stride is not None else max(1, (window or 2) // 2)
    if not 1 <= chunk <= LONGEST or (window is not None and not 1 <= step <= window <= LONGEST):
        raise InputError(
            f"chunk and window must be from 1 to {LONGEST}, and stride from 1 to window, got "
            f"chunk={chunk}, window={window} and stride={stride}"
        )
    pieces = _checked(model, pieces)
    start, buckets = time.perf_counter(), Buckets(FIRST_BUCKET, window)
    found = _carried(model, pieces, chunk) if not window else _windowed(model, pieces, window, step)
    for before, losses in found:
        after = before + 1 + len(losses)
        buckets.add(torch.arange(before + 1, after, device=losses.device), losses)
    if not buckets.count:
        raise InputError("a text to score must have at least two tokens: give a longer one")
    warn_beyond_training(model.config, min(buckets.count, window or buckets.count))
    return TextScore(buckets, 0, time.perf_counter() - start)


def score_file(
    model: LanguageModel,
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    chunk: int = CHUNK,
    window: int | None = None,
    stride: int | None = None,
) -> TextScore:
    """Score the text of a file in UTF-8; see :func:`score_text`.

    Raises:
        InputError: If the file cannot be read or is too short; otherwise as :func:`score_text`.
    """
    text_file(path, "text")
    try:
        with Path(path).open("rb") as file:
            pieces = token_chunks(file.read, tokenizer, begins=True)
            first = next(pieces)
            of_text = first[: 0 if tokenizer.beginning else 1].tolist()
            unscored = len(utf8(tokenizer.decode(of_text)))
            score = score_text(
                model, chain([first], pieces), chunk=chunk, window=window, stride=stride
            )
            n_bytes = file.tell() - unscored
            file.seek(0)
            n_words = sum(len(line.split()) for line in file)
            return TextScore(score.losses, n_bytes, score.seconds, n_words)
    except InputError as error:
        raise InputError(f"cannot score {path}: {error}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a file of text") from error


def _checked(
    model: LanguageModel, pieces: Iterable[Int[Tensor, "_"]]
) -> Iterator[Int[Tensor, "_"]]:
    for piece in pieces:
        check_axes(piece, "length")
        model.check_tokens(piece)
        yield piece


def _carried(
    model: LanguageModel, pieces: Iterable[Int[Tensor, "_"]], chunk: int
) -> Iterator[tuple[int, Float[Tensor, "_"]]]:
    """Losses of all tokens but the first, in order, and how many were scored before."""
    device = model.device
    state, tokens = model.init_state(1), torch.zeros(1, 0, dtype=torch.int64, device=device)
    scored = 0
    for part in (part for piece in pieces for part in piece.split(chunk)):
        tokens = torch.cat([tokens, part[None].to(device)], dim=1)
        if tokens.shape[1] > 1:
            reduce = losses_of(tokens[:, 1:], model.config.vocab_size)
            losses, state = model.forward_chunk(tokens[:, :-1], state, reduce=reduce)
            yield scored, losses[0]
            scored += losses.shape[1]
        tokens = tokens[:, -1:]  # the last token is not yet fed


def _windowed(
    model: LanguageModel, pieces: Iterable[Int[Tensor, "_"]], window: int, stride: int
) -> Iterator[tuple[int, Float[Tensor, "_"]]]:
    """Losses as from ``_carried``, and how many tokens of their window are not scored again.

    Each window starts from an empty state.
    """
    device, scored = model.device, 0
    tokens = torch.zeros(1, 0, dtype=torch.int64, device=device)
    for piece in pieces:
        tokens = torch.cat([tokens, piece[None].to(device)], dim=1)
        while tokens.shape[1] > window:
            yield scored, _losses(model, tokens[:, : window + 1])[scored:]
            tokens, scored = tokens[:, stride:], window - stride
    if tokens.shape[1] - 1 > scored:
        yield scored, _losses(model, tokens)[scored:]


def _losses(model: LanguageModel, tokens: Int[Tensor, "1 _"]) -> Float[Tensor, "_"]:
    """The losses of all tokens but the first, from an empty state."""
    reduce = losses_of(tokens[:, 1:], model.config.vocab_size)
    return model(tokens[:, :-1], reduce=reduce)[0]
