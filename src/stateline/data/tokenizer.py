"""Tokenizers convert text to token numbers and back, also one token at a time."""

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from stateline.errors import InputError
from stateline.files import write_text

FILE = "tokenizer.json"
"""Name of a tokenizer's file in a folder of a corpus or a run."""

_BORDER = re.compile(r".*\S(?=\s\S)", flags=re.DOTALL)

BYTE, CHARACTER = "stateline-byte", "stateline-character"


class Decoder(ABC):
    """Converts tokens to text one at a time; the joined results equal the text of ``decode``."""

    @abstractmethod
    def push(self, token: int) -> str:
        """Text that is certain after this token; may be empty, never half a character."""

    @abstractmethod
    def finish(self) -> str:
        """The text that was held back; call it after the last token.

        Another text may follow, which completes no character of this one.
        """


class Tokenizer(ABC):
    """Converts text to token numbers and back.

    Attributes:
        vocab_size: The largest token plus one.
        padded_size: Number of tokens of the model, where it is larger: output matrices are often
            padded to a round size. The tokens ``vocab_size`` and above have no text.
        beginning: Tokens that the model expects before a text, such as ``<s>``; often none.
        special_tokens: Tokens that stand for no text, such as ``<|im_end|>``.
        special_names: Names of some of them, by their names in templates of chats: ``bos_token``.
        chat_template: The template of transformers for chats; empty if there is none.
    """

    vocab_size: int
    padded_size: int = 0
    beginning: tuple[int, ...] = ()
    special_tokens: frozenset[int] = frozenset()
    special_names: Mapping[str, str] = MappingProxyType({})
    chat_template: str = ""

    @property
    def begin_of_text(self) -> int | None:
        """The token that precedes the first token of a text; ``None`` if there is none."""
        return self.beginning[-1] if self.beginning else None

    @property
    def end_of_text(self) -> int | None:
        """The token that separates texts in training; ``None`` if there is none."""
        return None

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a generated text; by default the end-of-text token alone."""
        return frozenset() if self.end_of_text is None else frozenset([self.end_of_text])

    @abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """The tokens of a text, as 64-bit integers, without special tokens at its ends.

        Raises:
            InputError: If the text cannot be encoded.
        """

    def begin(self, tokens: Int[np.ndarray, " length"]) -> Int[np.ndarray, " begun"]:
        """Put ``beginning`` before the tokens of a text, unless it begins with them itself."""
        start = np.array(self.beginning, dtype=np.int64)
        if np.array_equal(tokens[: len(start)], start):
            return tokens
        return np.concatenate([start, tokens])

    def prompt(self, text: str) -> Int[np.ndarray, " length"]:
        """The tokens of a text that a model reads from its beginning.

        A text that continues another has the tokens of :meth:`encode`.

        Raises:
            InputError: If the text cannot be encoded.
        """
        return self.begin(self.encode(text))

    def without_beginning(self) -> "Tokenizer":
        """This tokenizer for models that have read texts without ``beginning``."""
        return self

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Int[np.ndarray, " length"]]:
        """The tokens of a text that comes in pieces; joined, they are the tokens of the text.

        By default, text is encoded up to the last single space between two words, or as a whole if
        there is none, which requires tokens that do not cross such places.
        """
        rest = ""
        for piece in pieces:
            rest += piece
            border = _BORDER.match(rest)
            end = border.end() if border else len(rest)
            yield self.encode(rest[:end])
            rest = rest[end:]
        yield self.encode(rest)

    @abstractmethod
    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The text of tokens.

        Raises:
            InputError: If a token is not in the vocabulary.
        """

    def decoder(self) -> Decoder:
        """A decoder for a new text.

        By default it holds nothing back, which requires tokens of whole characters.
        """
        return _TokenDecoder(self)

    @abstractmethod
    def to_json(self) -> str:
        """Contents of its file; the same for equal tokenizers."""

    def save(self, path: str | Path) -> None:
        """Write its file; :func:`load_tokenizer` reads it.

        Raises:
            InputError: If it cannot be written.
        """
        write_text(Path(path), self.to_json())

    def check(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> None:
        """Check that tokens are in the vocabulary, or in its padding; see ``padded_size``.

        Raises:
            InputError: If one is not; the message shows their range.
        """
        size = max(self.vocab_size, self.padded_size)
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < size:
            raise InputError(
                f"tokens must be from 0 to {size - 1}, got {min(tokens)} to "
                f"{max(tokens)}: use the tokenizer that they were made with"
            )

    def with_text(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> list[int]:
        """Remove the tokens that have no text; see ``padded_size``.

        Raises:
            InputError: If a token is in neither vocabulary.
        """
        self.check(tokens)
        return [int(token) for token in tokens if token < self.vocab_size]


class _TokenDecoder(Decoder):
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def push(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def finish(self) -> str:
        return ""


class ByteTokenizer(Tokenizer):
    r"""Bytes of the text in UTF-8.

    Bytes that are not UTF-8 are kept by Python's ``surrogateescape``.

    Example:
        >>> ByteTokenizer().encode("né").tolist()
        [110, 195, 169]
        >>> decoder = ByteTokenizer().decoder()
        >>> [decoder.push(token) for token in (110, 195, 169)]
        ['n', '', 'é']
    """

    vocab_size = 256

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """The bytes of a text."""
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The text that has these bytes."""
        return bytes(self.with_text(tokens)).decode(errors="surrogateescape")

    def decoder(self) -> Decoder:
        """A decoder that holds back the bytes of an incomplete character."""
        return _ByteDecoder(self)

    def to_json(self) -> str:
        """Its type; there are no settings."""
        return json.dumps({"type": BYTE})


class _ByteDecoder(Decoder):
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")

    def push(self, token: int) -> str:
        return self.bytes.decode(bytes(self.tokenizer.with_text([token])))

    def finish(self) -> str:
        return self.bytes.decode(b"", final=True)


class CharacterTokenizer(Tokenizer):
    """A token for each character of a given alphabet.

    Args:
        characters: The alphabet; token i is character number i.

    Raises:
        InputError: If there are no characters, or one occurs twice.

    Example:
        >>> CharacterTokenizer.of(["banana"]).encode("nab").tolist()
        [2, 0, 1]
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._number = {character: number for number, character in enumerate(characters)}
        if not 0 < len(self._number) == len(characters):
            raise InputError(
                f"the characters of a tokenizer must be non-empty and unique, got {characters!r}"
            )

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """A tokenizer for the characters of texts, sorted."""
        alphabet: set[str] = set()
        for text in texts:
            alphabet.update(text)
        return cls("".join(sorted(alphabet)))

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """The number of each character.

        Raises:
            InputError: If a character is not in the alphabet.
        """
        try:
            return np.array([self._number[character] for character in text], dtype=np.int64)
        except KeyError as error:
            raise InputError(
                f"the tokenizer has no character {error.args[0]!r}: it knows only "
                "characters of the text that it was built from; leave the character out, or build "
                "it from all text"
            ) from error

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The characters that have these numbers."""
        return "".join(self.characters[token] for token in self.with_text(tokens))

    def to_json(self) -> str:
        """Its type and its characters in order."""
        return json.dumps({"type": CHARACTER, "characters": self.characters})


def utf8(text: str) -> bytes:
    """The bytes of a text, including escaped bytes that are not UTF-8.

    Raises:
        InputError: If it holds half of a surrogate pair, which cannot be encoded.
    """
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(
            f"a text must be Unicode, got half of a surrogate pair, {text[error.start]!r}, at "
            f"character {error.start}: leave it out"
        ) from error
