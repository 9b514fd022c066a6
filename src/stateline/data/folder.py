"""The text files of a folder."""

import os
from collections.abc import Collection
from pathlib import Path


def list_folder(root: Path, suffix: str = "", skipped: Collection[str] = ()) -> list[str]:
    """Sorted relative paths of the regular files below a folder, without hidden ones.

    Names end in ``suffix``; subfolders with a name in ``skipped`` are not read.
    """

    def fail(error: OSError) -> None:
        raise error

    names = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in skipped]
        paths = [Path(folder, name) for name in files if name[0] != "." and name.endswith(suffix)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def is_text(contents: bytes) -> bool:
    """Whether contents are not empty and have no zero byte in the first kilobyte."""
    return bool(contents) and b"\0" not in contents[:1024]
