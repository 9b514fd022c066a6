"""Hugging Face tokenizers; the only file that imports the package ``tokenizers``."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stateline.data.tokenizer import FILE, Decoder, Tokenizer
from stateline.errors import InputError, needed, reason
from stateline.files import write_text

_VOCABULARY, _MERGES = ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")
SETTINGS = "tokenizer_config.json"
"""Name of the file beside a tokenizer's that names its end-of-text token."""

GENERATION = "generation_config.json"
"""Name of the file beside a tokenizer's that names all tokens that end a generated text."""

TEMPLATE = "chat_template.jinja"
"""Name of the file beside a tokenizer's with the template of chats, which may also be a setting."""

END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")

PADDING = "<|pad|>"
"""A token that exported tokenizers add after the model's tokens; the model never sees it."""

_HALF = "\ufffd"  # replaces bytes that are not, or not yet, a character
_LONGEST, _KEPT = 32, 8

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""Names of the tokens of bytes in SentencePiece, which stand for characters without a token."""

_CUT = re.compile(r"(?<=\S)(?=\s\S)")
"""Before a single space, where nearly all pre-tokenizers split a text."""

_AROUND, _WINDOW, _TRIES = 200, 1 << 14, 20
"""A text is cut in its last ``_WINDOW`` characters, at one of at most ``_TRIES`` places.
At each place, ``_AROUND`` characters on both sides are compared."""


class SpecialTokens(NamedTuple):
    """What the files beside a tokenizer's say about its special tokens.

    Attributes:
        begin: Name of the token that begins a text; empty if there is none.
        end: Name of the end-of-text token; empty if there is none, ``None`` if that is not known.
        ends: Numbers of all tokens that end a generated text.
        chat: The template of transformers that writes chats with them; empty if there is none.
    """

    begin: str = ""
    end: str | None = None
    ends: tuple[int, ...] = ()
    chat: str = ""


_NONE_NAMED = SpecialTokens()


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the package ``tokenizers``, without its truncation and padding.

    Special tokens are neither added by ``encode`` nor left out when decoding; ``prompt`` adds those
    that the tokenizer's post-processor puts before a text.

    Args:
        text: Contents of its file.
        source: Name of the file, for messages.
        special: Its special tokens. If the end-of-text token is not known, it is the first name of
            ``END_OF_TEXT`` that the vocabulary has.

    Attributes:
        byte_tokens: The tokens of single bytes that SentencePiece has, as ``<0x0A>``.
        padding: Number of ``PADDING``, which exported tokenizers have, else -1.

    Raises:
        InputError: If the text is not a tokenizer or has no tokens, or the package is missing.
    """

    def __init__(
        self, text: str, source: str = "the given text", special: SpecialTokens = _NONE_NAMED
    ) -> None:
        package = _package()
        advice = f"give a {FILE} of Stateline or Hugging Face, or a folder with GPT-2's two files"
        with _in_one_line(f"{source} is not a tokenizer", advice):
            self._tokenizer = package.Tokenizer.from_str(text)
        for part in (self._tokenizer.normalizer, self._tokenizer.decoder):
            if (growth := _growth(part)) > _GROWTH:
                raise InputError(
                    f"the replacements of the tokenizer {source} may make a text {growth:.3g} "
                    f"times longer: at most {_GROWTH} times is taken"
                )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._text, self._source, self._special = text, source, special
        self.chat_template = special.chat
        names = {"bos_token": special.begin, "eos_token": special.end}
        self.special_names = {key: name for key, name in names.items() if name}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = frozenset(n for n, token in added.items() if token.special)
        numbers = self._tokenizer.get_vocab()
        self.padding = numbers.pop(PADDING, -1)
        self.byte_tokens = {numbers[name] for name in _BYTES if name in numbers}
        self.vocab_size = 1 + max(numbers.values(), default=-1)
        if not self.vocab_size:
            raise InputError(f"the tokenizer {source} has no tokens: give another")
        self.beginning = self._put_before()

    def _put_before(self) -> tuple[int, ...]:
        """The tokens that the post-processor puts before a text, here of one token of padding."""
        text = self._tokenizer.encode("", add_special_tokens=False)
        text.truncate(0)
        text.pad(1)
        with _in_one_line(f"the post-processor of {self._source} fails", "give another"):
            found = self._tokenizer.post_process(text)
        if 0 not in found.attention_mask:
            raise InputError(
                f"the post-processor of the tokenizer {self._source} drops the text: give another"
            )
        return tuple(found.ids[: found.attention_mask.index(0)])

    @property
    def begin_of_text(self) -> int | None:
        """The token that its settings name, or else the last one that it puts before a text."""
        number = self._tokenizer.token_to_id(self._special.begin) if self._special.begin else None
        return super().begin_of_text if number is None else number

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a text; ``None`` if the vocabulary has none."""
        if self._special.end == "":
            return None
        names = filter(None, (self._special.end, *END_OF_TEXT))
        numbers = map(self._tokenizer.token_to_id, names)
        return next((number for number in numbers if number is not None), None)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The end-of-text token, and those that ``generation_config.json`` names."""
        ends = (number for number in self._special.ends if 0 <= number < self.vocab_size)
        return super().end_tokens.union(ends)

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """The tokens of a text, which must be valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"this tokenizer needs text in UTF-8, got {text[error.start]!r} at character "
                f"{error.start}: convert the text, or use the tokenizer 'byte'"
            ) from error
        advice = "use one that knows all characters, such as 'byte'"
        with _in_one_line(f"the tokenizer {self._source} cannot encode the text", advice):
            # the fast batch does not compute offsets, which are not needed
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)

    def without_beginning(self) -> "HuggingFaceTokenizer":
        """This tokenizer without a token that begins a text, also in its file."""
        if self.begin_of_text is None:
            return self
        text, special = self._text, self._special._replace(begin="")
        if self.beginning:
            text = json.dumps(json.loads(text) | {"post_processor": None}, ensure_ascii=False)
        return HuggingFaceTokenizer(text, self._source, special)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Int[np.ndarray, " length"]]:
        """The tokens of a text that comes in pieces.

        Text is encoded up to the last place that divides no token: the text around that place has
        the same tokens as its two sides. Without such a place, the whole text is encoded.
        """
        rest = ""
        for piece in pieces:
            end, begin = self._last_cut(rest)
            if end:
                yield self.encode(rest[:end])
            rest = rest[begin:] + piece
        yield self.encode(rest)

    def _last_cut(self, text: str) -> tuple[int, int]:
        """Where a part of the text may end, and where the rest begins; zeros if all tries fail.

        The rest begins after the space if the tokenizer puts one before every text, as those of
        SentencePiece do.
        """
        found = _CUT.finditer(text, max(0, len(text) - _WINDOW), max(0, len(text) - _AROUND))
        places = [match.start() for match in found]
        for place in reversed(places[-_TRIES:]):
            left, right = text[max(0, place - _AROUND) : place], text[place : place + _AROUND]
            before, whole = self.encode(left), self.encode(left + right)
            for space in (0, 1):
                if np.array_equal(np.concatenate([before, self.encode(right[space:])]), whole):
                    return place, place + space
        return 0, 0

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The text of tokens; bytes that are not a character become U+FFFD."""
        known = self.with_text(tokens)
        with _in_one_line(f"the tokenizer {self._source} cannot decode tokens", "use another"):
            return str(self._tokenizer.decode(known, skip_special_tokens=False))

    def decoder(self) -> Decoder:
        """A decoder that decodes the last few tokens again for each new token.

        Where SentencePiece's tokens of bytes are no UTF-8, ``decode`` makes the characters before
        them U+FFFD, too; the decoder has returned these.
        """
        return _WindowDecoder(self)

    def to_json(self) -> str:
        """The text it was made from."""
        return self._text

    def save(self, path: str | Path) -> None:
        """Write its file, and beside it the settings that transformers and we read."""
        super().save(path)
        begin, end, ends, chat = self._special
        # Without this class, transformers takes that of the model's family, with other tokens.
        settings: dict[str, str | None] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        named = {"bos_token": begin, "eos_token": end, "chat_template": chat}
        settings |= {key: name for key, name in named.items() if name}
        if end == "":
            settings["eos_token"] = None  # not one of the usual names
        write_text(Path(path).with_name(SETTINGS), json.dumps(settings))
        if ends:
            write_text(Path(path).with_name(GENERATION), json.dumps({"eos_token_id": ends}))


class _WindowDecoder(Decoder):
    """Decodes the last tokens again for each new token, and returns the additional text.

    Trailing U+FFFD are held back, since the next token may complete them to a character. In a long
    run of U+FFFD, only the last can be an incomplete character. ``tokenizers.DecodeStream`` is no
    substitute: at the end it cannot return what it holds back, and it never returns invalid bytes.

    SentencePiece decodes a run of tokens of bytes as a whole: with one byte too few at either end,
    each becomes U+FFFD. So a run that ends with U+FFFD is kept whole, and the first tokens are
    dropped where the others have the same text alone.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self.tokenizer, self.window, self.shown = tokenizer, list[int](), 0

    def push(self, token: int) -> str:
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        unfinished = token in self.tokenizer.byte_tokens and text.endswith(_HALF)
        long = len(self.window) >= _LONGEST and not unfinished
        settled = len(text.removesuffix(_HALF) if long else text.rstrip(_HALF))
        new = text[self.shown : settled]
        self.shown = max(self.shown, settled)
        if long:
            held_back = len(text) - self.shown
            ends = [self.window[-size:] for size in range(_KEPT, 0, -1)]
            same = (end for end in ends if text.endswith(self.tokenizer.decode(end)))
            self.window = next(same, ends[0])
            self.shown = len(self.tokenizer.decode(self.window)) - held_back
        return new

    def finish(self) -> str:
        rest = self.tokenizer.decode(self.window)[self.shown :]
        if rest:  # the next token must not complete it
            self.window, self.shown = [], 0
        return rest


def load_pair(folder: Path) -> HuggingFaceTokenizer:
    """Read the byte-level BPE of a folder that has GPT-2's two files, and no others."""
    vocabulary, merges = (
        next((folder / name for name in names if (folder / name).is_file()), None)
        for names in (_VOCABULARY, _MERGES)
    )
    if vocabulary is None or merges is None:
        raise InputError(
            f"no tokenizer in {folder}: it needs {FILE}, or {' or '.join(_VOCABULARY)} and "
            f"{' or '.join(_MERGES)}"
        )
    package = _package()
    with _in_one_line(f"the tokenizer in {folder} is damaged", "copy it again"):
        tokenizer = package.Tokenizer(package.models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    known = (name for name in END_OF_TEXT if tokenizer.token_to_id(name) is not None)
    tokenizer.add_special_tokens([*known])
    return HuggingFaceTokenizer(tokenizer.to_str(), str(folder))


@contextmanager
def _in_one_line(what: str, advice: str) -> Iterator[None]:
    """Whatever the package raises, and a panic is no ``Exception``, becomes an InputError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise InputError(f"{what}: {reason(error):.300}; {advice}") from error


_GROWTH = 64
"""Limit on how many times longer than a text the replacements of a tokenizer may make it."""


def _growth(part: Any) -> float:
    """How many times longer a normaliser or a decoder may make a text."""
    described = json.loads(part.__getstate__()) if part is not None else {}
    return prod(map(_growth_of, _steps(described)))


def _steps(described: Any) -> Iterator[dict[str, Any]]:
    """The steps of a sequence, which may be nested."""
    if isinstance(described, dict):
        yield described
        described = described.get("normalizers") or described.get("decoders") or []
        for step in described if isinstance(described, list) else []:
            yield from _steps(step)


def _growth_of(step: dict[str, Any]) -> float:
    if step.get("type") != "Replace":
        return 1.0
    found, new = step["pattern"].get("String", ""), len(step["content"])
    return max(1.0, new / len(found)) if found else 1.0 + new  # an expression may match nothing


def _package() -> Any:
    return needed("tokenizers", "this tokenizer", "hf")
