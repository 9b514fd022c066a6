"""What of a folder is text."""

import os
from collections.abc import Collection
from pathlib import Path


def list_folder(root: Path, suffix: str = "", passed_over: Collection[str] = ()) -> list[str]:
    """Relative paths of the regular files below a folder, in order, without hidden ones.

    Args:
        root: The folder.
        suffix: How the names end.
        passed_over: Names of folders that are not entered.

    Raises:
        OSError: If a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    names = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in passed_over]
        paths = [Path(folder, name) for name in files if name[0] != "." and name.endswith(suffix)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def is_text(contents: bytes) -> bool:
    """Whether there is something, and no zero byte in the first kilobyte of it."""
    return bool(contents) and b"\0" not in contents[:1024]
