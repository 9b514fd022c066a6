"""Our tokenizers as tokenizers of transformers."""

import json
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from stateline.data import ByteTokenizer, CharacterTokenizer, Tokenizer
from stateline.data.huggingface import PADDING, HuggingFaceTokenizer
from stateline.errors import InputError
from stateline.generate import load_run


def tokenizer(source: str | Path | Tokenizer, *, padding: bool = True) -> PreTrainedTokenizerFast:
    """The tokenizer of a run, for transformers.

    It gives the tokens that the run's own tokenizer gives, and pads on the left.

    Args:
        source: Folder of a run, or a tokenizer of this library.
        padding: Have a padding token. It comes after the vocabulary, so no text has it; of all
            models, only those of :mod:`stateline.hf` accept it.

    Raises:
        InputError: If the run has no tokenizer, or one that transformers cannot represent.
    """
    given = source if isinstance(source, Tokenizer) else load_run(source)[1]
    made = PreTrainedTokenizerFast(
        tokenizer_object=_converted(given, padding),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    if given.begin_of_text is not None:
        made.bos_token = made.convert_ids_to_tokens(given.begin_of_text)
    if given.end_of_text is not None:
        made.eos_token = made.convert_ids_to_tokens(given.end_of_text)
    if isinstance(given, HuggingFaceTokenizer) and given.chat_template:
        made.chat_template = given.chat_template
    if padding:
        made.add_special_tokens({"pad_token": PADDING})
    return made


def _converted(given: Tokenizer, padding: bool) -> tokenizers.Tokenizer:
    if isinstance(given, HuggingFaceTokenizer):
        text = given.to_json()
        if given.padding >= 0 and not padding:
            parts = json.loads(text)
            added = [token for token in parts["added_tokens"] if token["content"] != PADDING]
            text = json.dumps(parts | {"added_tokens": added}, ensure_ascii=False)
        made = tokenizers.Tokenizer.from_str(text)
        made.no_truncation()
        made.no_padding()
        return made
    if isinstance(given, ByteTokenizer):
        return _bytes()
    if isinstance(given, CharacterTokenizer):
        return _characters(given.characters)
    raise InputError(
        "the run has no tokenizer that transformers can represent: it reads token numbers, so give "
        "the model tensors of them"
    )


def _bytes() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges; token i is byte i, under the character that stands for it."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown}
    names |= {chr(256 + place): byte for place, byte in enumerate(others)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=names, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _characters(alphabet: str) -> tokenizers.Tokenizer:
    """A word per character; text with any other character cannot be encoded."""
    numbers = {character: number for number, character in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=PADDING))
    pattern = tokenizers.Regex(r"[\s\S]")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, behavior="isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return made
