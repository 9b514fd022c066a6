"""The folder of a training run: its checkpoints, and whether it can be written to."""

from pathlib import Path

from stateline.errors import InputError
from stateline.files import check_writable
from stateline.train.metrics import METRICS

CHECKPOINTS = "checkpoints"


def found(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted((folder / CHECKPOINTS).glob(f"step-{'[0-9]' * 8}"))


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
