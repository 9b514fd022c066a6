"""Writing a run as a folder for transformers."""

import re
from pathlib import Path

import torch

from stateline.errors import InputError
from stateline.files import user_path, write_folder
from stateline.generate import NumberTokenizer, load_run
from stateline.hf.bundle import CODE, bundled_code
from stateline.hf.card import CARD, card, find_record
from stateline.hf.model import wrap
from stateline.hf.tokenizers import tokenizer

_REMOTE_CODE = '''"""Lets trust_remote_code=True load this model; it needs the package stateline."""

from stateline.hf import StatelineConfig, StatelineForCausalLM

__all__ = ["StatelineConfig", "StatelineForCausalLM"]
'''

_WITH_CODE = f"""
## Without the package

The folder holds the code of the model, `{CODE}`, which runs if you allow it:
`AutoModelForCausalLM.from_pretrained("this folder", trust_remote_code=True)`
"""


def export(
    run: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    remote_code: bool = False,
    self_contained: bool = False,
) -> list[str]:
    """Write a run's model, tokenizer and model card as a folder for transformers.

    The folder appears whole or not at all. Stateline's own commands also read it.

    Args:
        run: Folder of a language model, a run or a checkpoint.
        folder: Folder to write, which must not exist.
        dtype: Precision of the weights; by default that in which they were saved.
        max_shard_size: Largest file of weights, such as 500MB.
        remote_code: Add a file with which ``trust_remote_code=True`` finds the classes, for
            programs that cannot import :mod:`stateline.hf` first. The package must still be
            installed.
        self_contained: Add a file with the sources of the classes, with which
            ``trust_remote_code=True`` works without the package.

    Returns:
        The names of the files.

    Raises:
        InputError: If the run cannot be read, the folder exists or cannot be written,
            ``max_shard_size`` is malformed, or a self-contained model has layers of your own.
    """
    run, folder = user_path(run, "model"), user_path(folder, "folder to write")
    if folder.exists():
        raise InputError(f"{folder} exists: choose another folder, or remove it")
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?[KMGT]B", max_shard_size, flags=re.IGNORECASE):
        raise InputError(f"max_shard_size must be a size such as 500MB, got {max_shard_size!r:.40}")
    model, own = load_run(run, dtype=dtype)
    # A model that reads token numbers has no tokenizer.
    text, record = None if isinstance(own, NumberTokenizer) else tokenizer(own), find_record(run)
    end = None if text is None else text.eos_token_id
    begin, ends = own.begin_of_text, sorted(own.end_tokens)
    wrapped = wrap(
        model,
        eos_token_id=ends if len(ends) > 1 else end,
        bos_token_id=end if begin is None else begin,
    )
    if text is not None:
        wrapped.generation_config.pad_token_id = text.pad_token_id
    code = bundled_code(model) if self_contained else _REMOTE_CODE if remote_code else ""
    if code:
        name = CODE.removesuffix(".py")
        wrapped.config.auto_map = {
            "AutoConfig": f"{name}.StatelineConfig",
            "AutoModelForCausalLM": f"{name}.StatelineForCausalLM",
        }

    def write(temporary: Path) -> None:
        text_of_card = card(model, record) + (_WITH_CODE if self_contained else "")
        (temporary / CARD).write_text(text_of_card, encoding="utf-8")
        wrapped.save_pretrained(temporary, max_shard_size=max_shard_size)
        if text is not None:
            text.save_pretrained(temporary)
        if code:
            (temporary / CODE).write_text(code, encoding="utf-8")

    write_folder(folder, write)
    return sorted(path.name for path in folder.iterdir())
