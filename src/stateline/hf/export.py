"""Writing a run as a folder of transformers."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from stateline.data import Tokenizer
from stateline.errors import InputError
from stateline.files import user_path, write_folder
from stateline.generate import NumberTokenizer, load_run
from stateline.hf.card import CARD, card, find_record
from stateline.hf.model import wrap
from stateline.hf.tokenizers import tokenizer

REMOTE = "modeling_stateline.py"

_REMOTE_CODE = '''"""Lets trust_remote_code=True load this model; it needs the package stateline."""

from stateline.hf import StatelineConfig, StatelineForCausalLM

__all__ = ["StatelineConfig", "StatelineForCausalLM"]
'''


def export(
    run: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    remote_code: bool = False,
) -> list[str]:
    """Write a run's model, tokenizer and model card as a folder of transformers.

    The folder appears whole or not at all. Our own commands read it, too.

    Args:
        run: Folder of a language model, a run or a checkpoint.
        folder: Folder to write, which must not exist.
        dtype: Precision of the weights; by default that in which they were saved.
        max_shard_size: Largest file of weights.
        remote_code: Add a file with which ``trust_remote_code=True`` finds the classes, for
            programs that cannot import :mod:`stateline.hf` first. The package must still be
            installed.

    Returns:
        The names of the files.

    Raises:
        InputError: If the run cannot be read, or the folder exists or cannot be written.
    """
    run, folder = user_path(run, "model"), user_path(folder, "folder to write")
    if folder.exists():
        raise InputError(f"{folder} exists: choose another folder, or remove it")
    model, own = load_run(run, dtype=dtype)
    text, record = _representable(own), find_record(run)
    end = None if text is None else text.eos_token_id
    wrapped = wrap(model, eos_token_id=end, bos_token_id=end)
    if text is not None:
        wrapped.generation_config.pad_token_id = text.pad_token_id
    if remote_code:
        name = REMOTE.removesuffix(".py")
        wrapped.config.auto_map = {
            "AutoConfig": f"{name}.StatelineConfig",
            "AutoModelForCausalLM": f"{name}.StatelineForCausalLM",
        }

    def write(temporary: Path) -> None:
        (temporary / CARD).write_text(card(model, record), encoding="utf-8")
        wrapped.save_pretrained(temporary, max_shard_size=max_shard_size)
        if text is not None:
            text.save_pretrained(temporary)
        if remote_code:
            (temporary / REMOTE).write_text(_REMOTE_CODE, encoding="utf-8")

    write_folder(folder, write)
    return sorted(path.name for path in folder.iterdir())


def _representable(own: Tokenizer) -> PreTrainedTokenizerFast | None:
    """The tokenizer; ``None`` for a model that reads token numbers."""
    return None if isinstance(own, NumberTokenizer) else tokenizer(own)
