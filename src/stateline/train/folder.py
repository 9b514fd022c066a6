"""The folder of a training run: its checkpoints, and whether it can be written to."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stateline.errors import InputError
from stateline.files import changed_file, check_writable, read_json_object
from stateline.train.metrics import METRICS

CHECKPOINTS = "checkpoints"

RECORD, MANIFEST = "training.json", "manifest.json"
"""Files of a checkpoint: everything but tensors, and the hashes of all other files."""

BROKEN = OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError
"""Exceptions that a damaged checkpoint may cause."""


def found(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((folder / CHECKPOINTS).glob(f"step-{'[0-9]' * 8}"))


def opened(path: Path, rank: int = 0, count: int = 1) -> tuple[list[str], dict[str, Any]]:
    """The record of a checkpoint and its files with tensors, after a check of their hashes.

    Args:
        path: Folder of the checkpoint.
        rank: Number of this process, which checks its share of the files with tensors.
        count: Number of processes.

    Raises:
        ValueError: If a file is not as it was written.
    """
    hashes = read_json_object(path / MANIFEST, "manifest of the checkpoint")["sha256"]
    tensors = sorted(name for name in hashes if name.endswith(".safetensors"))
    of_others = {*tensors} - {*tensors[rank::count]}
    if changed := changed_file(path, {n: hashes[n] for n in hashes if n not in of_others}):
        raise ValueError(f"{changed} is not as it was written")
    return tensors, read_json_object(path / RECORD, "record of the checkpoint")


def is_whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there, as they were written."""
    try:
        opened(path)
    except BROKEN:
        return False
    return True


def check_run_folder(folder: Path) -> None:
    """Check that metrics and checkpoints can be written, before anything is computed.

    Nothing is created or changed.

    Raises:
        InputError: If a folder cannot be written to, or something else has the name of one.
    """
    for path in (folder, folder / CHECKPOINTS):
        if path.exists() and not path.is_dir():
            raise InputError(
                f"cannot write {path / METRICS}: {path} is not a folder; choose another"
            )
    check_writable(folder / METRICS)
    check_writable(folder / CHECKPOINTS / "step-00000000")
