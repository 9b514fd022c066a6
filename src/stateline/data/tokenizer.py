"""Tokenizers: text to token numbers and back, also one token at a time."""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from stateline.errors import InputError
from stateline.files import write_text

FILE = "tokenizer.json"
"""Name of a tokenizer's file in a folder of a corpus or a run."""

BYTE, CHARACTER = "stateline-byte", "stateline-character"


class Decoder(ABC):
    """Tokens to text, one at a time: what all calls return, joined, is what ``decode`` returns."""

    @abstractmethod
    def push(self, token: int) -> str:
        """The text that is certain with this token; never half a character, often nothing."""

    @abstractmethod
    def finish(self) -> str:
        """What was held back, now that no token follows."""


class Tokenizer(ABC):
    """Text to token numbers and back.

    Attributes:
        vocab_size: One more than the largest token.
    """

    vocab_size: int

    @abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """The tokens of a text, as 64-bit integers; nothing is added at its ends.

        Raises:
            InputError: If there are no tokens for the text.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The text of tokens.

        Raises:
            InputError: If a token is not in the vocabulary.
        """

    @abstractmethod
    def decoder(self) -> Decoder:
        """A decoder at the beginning of a text."""

    @abstractmethod
    def to_json(self) -> str:
        """What its file says; equal tokenizers say the same."""

    def save(self, path: str | Path) -> None:
        """Write its file; :func:`load_tokenizer` reads it.

        Raises:
            InputError: If it cannot be written.
        """
        write_text(Path(path), self.to_json())

    def check(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> None:
        """Refuse tokens that are not in the vocabulary.

        Raises:
            InputError: Naming the range that came.
        """
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise InputError(
                f"tokens must be from 0 to {self.vocab_size - 1}, got {min(tokens)} to "
                f"{max(tokens)}: use the tokenizer that they were made with"
            )


class ByteTokenizer(Tokenizer):
    r"""Bytes of the text in UTF-8.

    Bytes that are not UTF-8 pass unharmed as Python's ``surrogateescape`` has them.

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
        self.check(tokens)
        return bytes(map(int, tokens)).decode(errors="surrogateescape")

    def decoder(self) -> Decoder:
        """A decoder that holds back the bytes of an unfinished character."""
        return _ByteDecoder(self)

    def to_json(self) -> str:
        """A name is all there is to say."""
        return json.dumps({"type": BYTE})


class _ByteDecoder(Decoder):
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")

    def push(self, token: int) -> str:
        self.tokenizer.check([token])
        return self.bytes.decode(bytes([token]))

    def finish(self) -> str:
        return self.bytes.decode(b"", final=True)


class CharacterTokenizer(Tokenizer):
    """A token for each character of a given alphabet.

    Args:
        characters: The alphabet; token i is character number i.

    Raises:
        InputError: If there is no character, or one comes twice.

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
                f"the characters of a tokenizer must be some and all different, got {characters!r}"
            )

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """The tokenizer whose alphabet are the characters of texts, sorted."""
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
                f"the tokenizer has no character {error.args[0]!r}: it knows those of the text "
                "that it was built from; leave it out, or build the tokenizer from all text"
            ) from error

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """The characters that have these numbers."""
        self.check(tokens)
        return "".join(self.characters[token] for token in tokens)

    def decoder(self) -> Decoder:
        """A decoder that never holds anything back."""
        return _CharacterDecoder(self)

    def to_json(self) -> str:
        """The characters in their order."""
        return json.dumps({"type": CHARACTER, "characters": self.characters})


class _CharacterDecoder(Decoder):
    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self.tokenizer = tokenizer

    def push(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def finish(self) -> str:
        return ""


def utf8(text: str) -> bytes:
    """The bytes of a text that may hold bytes which are not UTF-8.

    Raises:
        InputError: If it holds half of a surrogate pair, which has no bytes.
    """
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(
            f"a text must be Unicode, got half of a surrogate pair, {text[error.start]!r}, at "
            f"character {error.start}: leave it out"
        ) from error
