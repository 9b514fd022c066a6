"""What a trained model's folder holds: the model, and how it reads text."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from stateline.data import ByteTokenizer, Decoder, Tokenizer, load_tokenizer
from stateline.data.tokenizer import FILE
from stateline.errors import InputError
from stateline.layers.compose import title
from stateline.models.checkpoint import CONFIG, load_model
from stateline.models.language_model import LanguageModel


def find_model(folder: str | Path) -> Path:
    """The folder of a run's model: itself, or else its newest checkpoint.

    Checkpoints are ``checkpoints/step-00000500`` and the like.

    Raises:
        InputError: If the folder is that of a comparison, which holds many models.
    """
    checkpoints = sorted(Path(folder).glob(f"checkpoints/step-*/{CONFIG}"))
    if (Path(folder) / CONFIG).is_file():
        return Path(folder)
    if models := sorted(Path(folder).glob(f"runs/*/{CONFIG}")):
        raise InputError(
            f"{folder} holds {len(models)} models: give the folder of one, as {models[0].parent}"
        )
    return checkpoints[-1].parent if checkpoints else Path(folder)


def load_run(folder: str | Path) -> tuple[LanguageModel, Tokenizer]:
    """Read a run's model, and the tokenizer that lies beside it or beside its checkpoints.

    Without one, a model of 256 tokens reads bytes, and any other the numbers of its tokens.

    Args:
        folder: Of a model, a run, or a checkpoint of one.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        InputError: If a file is missing or damaged, or the tokenizer has more tokens.
    """
    home = find_model(folder)
    model = load_model(home)
    vocab_size = model.config.vocab_size
    near = [home / FILE, *([home.parents[1] / FILE] if _is_checkpoint(home) else [])]
    file = next((path for path in near if path.is_file()), None)
    if file is None:
        return model, ByteTokenizer() if vocab_size == 256 else NumberTokenizer(vocab_size)
    tokenizer = load_tokenizer(file)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{file} has {tokenizer.vocab_size} tokens, but the model in {home} {vocab_size}: "
            "give the tokenizer that the model was trained with"
        )
    return model, tokenizer


def growing_layers(model: LanguageModel) -> list[str]:
    """Layers whose state grows with the length of the text, by number and kind.

    Example:
        >>> from stateline.models.config import ModelConfig
        >>> growing_layers(LanguageModel(ModelConfig("h3 attention", vocab_size=8, d_model=8)))
        ['2 Attention']
    """
    return [
        f"{number} {title(part)}"
        for number, part in enumerate(model.stack.links)
        if part.state_grows
    ]


class NumberTokenizer(Tokenizer):
    """The numbers of the tokens, as text: for models that know no other.

    Args:
        vocab_size: Of the model.

    Example:
        >>> NumberTokenizer(10).encode("3 1 4").tolist(), NumberTokenizer(10).decode([1, 5])
        ([3, 1, 4], '1 5 ')
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """Read numbers.

        Raises:
            InputError: If the text has anything else.
        """
        try:
            return np.array([int(number) for number in text.split()], dtype=np.int64)
        except (ValueError, OverflowError) as error:  # not a number, or one beyond 64 bits
            raise InputError(
                f"the model has {self.vocab_size} tokens and no {FILE}: give the prompt as "
                f"token numbers, got {text[:40]!r}"
            ) from error

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """Write numbers, each with a space after it."""
        return "".join(f"{token} " for token in tokens)

    def decoder(self) -> Decoder:
        """A decoder that never holds anything back."""
        return _NumberDecoder()

    def to_json(self) -> str:
        """The number of tokens is all there is to say."""
        return json.dumps({"type": "stateline-number", "vocab_size": self.vocab_size})


class _NumberDecoder(Decoder):
    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


def _is_checkpoint(folder: Path) -> bool:
    return folder.absolute().parent.name == "checkpoints"
