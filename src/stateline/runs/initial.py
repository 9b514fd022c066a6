"""The model whose weights a run starts from."""

import dataclasses
import hashlib

from stateline.errors import InputError
from stateline.files import sha256
from stateline.generate.runs import find_model, read_model_config
from stateline.models.config import ModelConfig


def initial_config(folder: str) -> ModelConfig:
    """The configuration of the model that a run starts from.

    Raises:
        InputError: If there is none, or it is no language model.
    """
    config = read_model_config(folder)
    if type(config) is not ModelConfig:
        raise InputError(f"a run can start from a language model, but {folder} is a {config.kind}")
    return config


def weights_hash(folder: str) -> str:
    """A hash of all files of weights of a model."""
    files = sorted(
        path
        for path in find_model(folder).iterdir()
        if path.suffix in (".safetensors", ".bin", ".pt") and path.is_file()
    )
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def as_in_folder(config: ModelConfig, source: ModelConfig, folder: str) -> ModelConfig:
    """The configuration with the vocabulary of the model that the run starts from.

    Raises:
        InputError: If that model cannot be trained on the task, or the options change it.
    """
    if type(config) is ModelConfig and config.vocab_size > source.vocab_size:
        raise InputError(
            f"the task has {config.vocab_size:,} tokens, but the model in {folder} "
            f"{source.vocab_size:,}: choose a tokenizer with fewer"
        )
    if (
        type(config) is not ModelConfig
        or dataclasses.replace(config, vocab_size=source.vocab_size) != source
    ):
        raise InputError(
            f"the run would have another model than that in {folder}: leave out options of the "
            "model, and choose a task for language models"
        )
    return source
