"""Writing files so that no reader ever meets half of one."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from stateline.errors import InputError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place in one step.

    Args:
        path: Where the file shall be; what was there stays untouched until the new one is whole.
        write: Called with the path of the temporary file.

    Raises:
        InputError: If the folder cannot be written to, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise _cannot_write(path, error) from error
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        _sync(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary folder beside ``path``, then put it in place in one step.

    Args:
        path: Where the folder shall be; one of that name is removed just before.
        write: Called with the path of the temporary folder.

    Raises:
        InputError: If it cannot be written, or the disk is full; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        write(temporary)
        temporary.chmod(0o755)
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except (OSError, SafetensorError, InputError) as error:
        raise _cannot_write(path, error.__cause__ or error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def check_writable(path: Path) -> None:
    """See that a file can be written, before the work is done that it shall hold; nothing is left.

    Raises:
        InputError: If it is a folder, or no file can be made where it shall be.
    """
    parents = path.absolute().parents
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=next(parent for parent in parents if parent.exists())):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file.

    Raises:
        InputError: If it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise _cannot_write(path, error) from error


def _sync(path: Path) -> None:
    """Have the disk hold a file or folder before a name points to it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: BaseException) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"cannot write {path}: {reason}; choose another folder")
