"""Data: tokenizers, and text as tokens on disk."""

from stateline.data.corpus import Corpus, Split, open_corpus
from stateline.data.load import load_tokenizer
from stateline.data.plan import CorpusSettings
from stateline.data.tokenizer import ByteTokenizer, CharacterTokenizer, Decoder, Tokenizer
from stateline.data.write import Progress, write_corpus

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "CorpusSettings",
    "Decoder",
    "Progress",
    "Split",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "write_corpus",
]
