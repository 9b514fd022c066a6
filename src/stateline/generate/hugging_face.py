"""Reading a causal language model with the package ``transformers``."""

from pathlib import Path
from typing import Any

import torch

from stateline.errors import InputError, needed
from stateline.files import user_path

HUGGING_FACE = "hf:"
"""Prefix of a folder that the package transformers reads."""


def transformers_package() -> Any:
    """The package ``transformers``, without its progress bars and advice.

    Raises:
        InputError: If it is not installed.
    """
    package = needed("transformers", "this", "hf")
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def read_hugging_face(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """Read a causal language model from a local folder; no code of the folder is run.

    Args:
        folder: Folder that ``save_pretrained`` wrote.
        device: Device of the weights.
        dtype: Precision of the weights; by default that in which they were saved.

    Returns:
        The model, in evaluation mode.

    Raises:
        InputError: If the package is missing, or cannot read the folder.
    """
    path = user_path(folder, "model")
    if not (path / "config.json").is_file():
        raise InputError(
            f"there is no Hugging Face model in {folder}: give a folder with config.json"
        )
    package = transformers_package()
    try:
        model = package.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the package may raise any exception
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"transformers cannot read the model in {folder}: {reason}") from error
    return model.to(device).eval()
