"""The folder of a trained model: its weights and its tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int

from stateline.data import ByteTokenizer, Tokenizer, load_tokenizer
from stateline.data.gguf_tokenizer import gguf_tokenizer
from stateline.data.tokenizer import FILE
from stateline.errors import InputError, check_choice
from stateline.files import model_path, sha256
from stateline.layers.compose import title
from stateline.models.checkpoint import CONFIG, check_kind, load_any
from stateline.models.config import ModelConfig
from stateline.models.convert.gguf import SUFFIX as GGUF_SUFFIX
from stateline.models.convert.table import is_published, load_pretrained, published_config
from stateline.models.factory import AnyModel, check_precision, read_config
from stateline.models.language_model import LanguageModel

Weights = Literal["int8"]
"""What large matrices can be rounded to, to read fewer bytes per token."""


def find_model(folder: str | Path) -> Path:
    """The folder of a run's model: the final model, or else its newest checkpoint.

    Raises:
        InputError: If the folder does not exist, cannot be read, or is a comparison, which holds
            several models.
    """
    folder = model_path(folder)
    if (folder / CONFIG).is_file():
        return folder
    if models := sorted(folder.glob(f"runs/*/{CONFIG}")):
        raise InputError(
            f"{folder} holds {len(models)} models: give the folder of one, as {models[0].parent}"
        )
    checkpoints = sorted(folder.glob(f"checkpoints/step-*/{CONFIG}"))
    return checkpoints[-1].parent if checkpoints else folder


def weights_hash(folder: str | Path) -> str:
    """A hash of all files of weights of a model."""
    home = find_model(folder)
    files = sorted(
        path
        for path in ([home] if home.is_file() else home.iterdir())
        if path.suffix in (".safetensors", ".bin", ".pt", GGUF_SUFFIX) and path.is_file()
    )
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def load_any_run(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> AnyModel:
    """Read a run's model, of any kind, or a published one; arguments as for :func:`load_run`."""
    check_precision(dtype)
    home = find_model(folder)
    if is_published(home):
        return load_pretrained(home, device=device, dtype=dtype)
    return load_any(home).to(device, dtype)


def load_run(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    weights: Weights | None = None,
) -> tuple[LanguageModel, Tokenizer]:
    """Read a run's model and its tokenizer, which is beside the model or in the run's folder.

    Without a tokenizer, a model of 256 tokens reads bytes, and any other reads token numbers.

    Args:
        folder: Folder of a model, a run, or a checkpoint; or a published model, a folder or a file.
        device: Device of the model.
        dtype: Precision of the weights; by default that in which they were saved.
        tokenizer: A tokenizer instead of the model's own, as for
            :func:`stateline.data.load_tokenizer`.
        weights: ``"int8"`` rounds the large matrices to integers of 8 bits, see
            :meth:`LanguageModel.to_int8_ <stateline.LanguageModel.to_int8_>`.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        InputError: If a file is missing or damaged, the tokenizer has more tokens than the model,
            or ``weights`` is unknown.
    """
    if weights is not None:
        check_choice("weights", weights, get_args(Weights))
    home = find_model(folder)
    model = check_kind(load_any_run(home, device=device, dtype=dtype), "language_model", home)
    if weights == "int8":
        model.to_int8_()
    vocab_size = model.config.vocab_size
    if (file := tokenizer or own_tokenizer(home)) is None:
        return model, ByteTokenizer() if vocab_size == 256 else NumberTokenizer(vocab_size)
    text = load_tokenizer(file)
    if text.vocab_size > vocab_size:
        raise InputError(
            f"the tokenizer {file} has {text.vocab_size} tokens, but the model in {home} "
            f"{vocab_size}: give the tokenizer that the model was trained with"
        )
    text.padded_size = vocab_size
    return model, text


def read_model_config(folder: str | Path) -> ModelConfig:
    """The configuration of the model in a folder, as for :func:`load_run`; reads no weights.

    Raises:
        InputError: If there is none, or it is damaged or of an unknown format.
    """
    home = find_model(folder)
    return published_config(home) if is_published(home) else read_config(home / CONFIG)


def tokenizer_places(home: Path) -> list[Path]:
    """The folders in which a model's tokenizer may be: beside the model, or in its run.

    That of a GGUF file is in it.
    """
    if home.suffix == GGUF_SUFFIX and home.is_file():
        found = gguf_tokenizer(home)
        return [] if found is None else [found]
    beside = home.parent if home.is_file() else home
    whole = home.absolute()
    return [beside, whole.parents[1]] if whole.parent.name == "checkpoints" else [beside]


def own_tokenizer(home: Path) -> Path | None:
    """The file of a model's tokenizer, or the folder that holds GPT-2's two files, if any."""
    for folder in tokenizer_places(home):
        if (folder / FILE).is_file():
            return folder / FILE
        if all((folder / name).is_file() for name in ("vocab.json", "merges.txt")):
            return folder
    return None


def growing_layers(model: LanguageModel) -> list[str]:
    """Layers whose state grows with the length of the text, by position and kind.

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
    """Reads and writes token numbers, for models without a tokenizer.

    Args:
        vocab_size: Number of tokens of the model.

    Example:
        >>> NumberTokenizer(10).encode("3 1 4").tolist(), NumberTokenizer(10).decode([1, 5])
        ([3, 1, 4], '1 5 ')
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """Read numbers.

        Raises:
            InputError: If the text is anything else.
        """
        words = text.split()
        try:
            return np.array([int(word) for word in words], dtype=np.int64)
        except (ValueError, OverflowError) as error:  # not a number, or one beyond 64 bits
            wrong = next(w for w in words if not (w.isdecimal() and len(w) < 20 and int(w) < 2**63))
            raise InputError(
                f"the model has {self.vocab_size} tokens and no {FILE}, so text must be token "
                f"numbers, got {wrong[:20]!r}: put the tokenizer beside the model"
            ) from error

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """Write numbers, each followed by a space."""
        return "".join(f"{token} " for token in tokens)

    def to_json(self) -> str:
        """The number of tokens, as JSON."""
        return json.dumps({"type": "stateline-number", "vocab_size": self.vocab_size})
