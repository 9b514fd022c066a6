"""The folders of runs and comparisons: the names in them, and reading their results."""

import os
import re
from pathlib import Path

from stateline.errors import InputError, reason
from stateline.files import read_json, regular_file
from stateline.plugins import imported
from stateline.runs.record import RecordT
from stateline.runs.results import Results, RunRecord, from_json

RESULTS, RESULT, SPEED = "results.json", "result.json", "speed"
"""Files with the results of a comparison (or ``stateline train``) and a run; folder of speeds."""

IMPORTS = "imports.json"
"""Name of the file that lists the user's code that was imported when a run began."""


def slug(text: str) -> str:
    """The letters and digits of a text, joined by hyphens, for use in a file name or an id.

    Example:
        >>> slug("copying(max_len=20)")
        'copying-max-len-20'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:60] or "unnamed"


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Read and validate the results of a comparison or a training run.

    Args:
        folder: Folder that holds ``results.json``.

    Raises:
        InputError: If the file is missing, cannot be read, or is damaged.
    """
    if (results := _read(Path(folder) / RESULTS, Results)) is None:
        raise InputError(
            f"no results in {folder}: {RESULTS} is missing; give the folder of a comparison or "
            "a training run"
        )
    return results


def read_run(folder: Path) -> RunRecord | None:
    """Read and validate the result of one run; ``None`` if there is none.

    Raises:
        InputError: If ``result.json`` cannot be read, or is damaged.
    """
    return _read(folder / RESULT, RunRecord)


def stored_run(folder: Path) -> RunRecord | None:
    """The result of one run; ``None`` if there is none or it is damaged."""
    return stored(folder, RunRecord)


def stored(folder: Path, kind: type[RecordT]) -> RecordT | None:
    """The record in ``result.json``; ``None`` if there is none or it is damaged."""
    try:
        return _read(folder / RESULT, kind)
    except InputError:
        return None


def recorded_imports(folder: Path) -> list[str]:
    """Files and modules of the user's code that a run was begun with.

    Raises:
        InputError: If the record is damaged.
    """
    path = folder / IMPORTS
    try:
        found = [] if _is_missing(path) else read_json(path, "list of imports")
    except InputError as error:
        raise InputError(f"{error}; remove it") from error
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise InputError(f"{path} must be a list of names: remove it")
    return found


def run_of(folder: Path) -> Path:
    """The folder of a run, given itself or one of its checkpoints."""
    whole = folder.absolute()
    return whole.parents[1] if whole.parent.name == "checkpoints" else folder


def check_imports(folder: Path) -> None:
    """Check that the user's code that a run needs has been imported.

    Code is imported only if the user names it, never because a folder does. A file may have moved,
    so a file of the same name is accepted.

    Args:
        folder: Folder of a run, or of one of its checkpoints.

    Raises:
        InputError: If something has not been imported.
    """
    here, needed = {Path(name).name for name in imported()}, recorded_imports(run_of(folder))
    if missing := [name for name in needed if Path(name).name not in here]:
        options = " ".join(f"--import {name}" for name in missing)
        raise InputError(f"the model in {folder} needs your own code: add {options}")


def _is_missing(path: Path) -> bool:
    """Whether there is nothing of that name; what cannot be looked up is not missing."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass  # opening it will explain why
    return False


def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
    if _is_missing(path):
        return None
    file = regular_file(path, "result")
    try:
        return from_json(file.read_bytes(), kind)
    except InputError as error:
        raise InputError(f"cannot use {path}: {error}") from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: {reason(error)}; run its command again") from error
