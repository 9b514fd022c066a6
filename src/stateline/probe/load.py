"""Reading the models for a probe, and hashing their files."""

from hashlib import sha256
from pathlib import Path

import torch

from stateline.files import user_path
from stateline.generate import load_run
from stateline.generate.hugging_face import HUGGING_FACE
from stateline.generate.runs import find_model
from stateline.probe.reader import Reader, StatelineReader


def load_reader(
    spec: str,
    *,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Reader:
    """Read a model.

    Args:
        spec: A folder of a run or a model of Stateline, a folder with published weights, or
            ``hf:`` and a folder for the package transformers.
        tokenizer: A tokenizer instead of the model's own, as for
            :func:`stateline.data.load_tokenizer`.
        device: Device of the weights.
        dtype: Precision of the weights; by default that in which they were saved.

    Raises:
        InputError: If the model or its tokenizer cannot be read.
    """
    if spec.startswith(HUGGING_FACE):
        from stateline.probe.hugging_face import HuggingFaceReader

        return HuggingFaceReader(spec, tokenizer=tokenizer, device=device, dtype=dtype)
    return StatelineReader(spec, *load_run(spec, device=device, dtype=dtype, tokenizer=tokenizer))


def fingerprint(spec: str, tokenizer: str | None) -> str:
    """A hash of the names, sizes and times of the files of a model and its tokenizer."""
    home = find_model(spec.removeprefix(HUGGING_FACE))
    text = _about(user_path(tokenizer, "tokenizer")) if tokenizer else None
    return sha256(repr((_about(home), tokenizer == "byte" or text)).encode()).hexdigest()


def _about(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of each file in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    about = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in about]
