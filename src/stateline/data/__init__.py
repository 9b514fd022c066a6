"""Data: tokenizers, and text as tokens on disk."""

from stateline.data.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    Decoder,
    Tokenizer,
    load_tokenizer,
)

__all__ = ["ByteTokenizer", "CharacterTokenizer", "Decoder", "Tokenizer", "load_tokenizer"]
