"""Results in a storage that fsspec knows, such as ``s3://bucket/folder``."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stateline.compare.news import News
from stateline.errors import InputError
from stateline.runs.folder import RESULT, RESULTS
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.train.folder import MANIFEST, found, is_whole

_LAST = (MANIFEST, RESULT, RESULTS)
"""Files that show that a folder is complete; they are written after all other files."""


def is_url(place: str) -> bool:
    """Whether a place is a URL, and not a local folder."""
    return "://" in place


class Mirror:
    """A local folder and its copy in a storage.

    Args:
        url: Folder in the storage.
        folder: Local folder.

    Raises:
        InputError: If fsspec is not installed, or does not know such a URL.
    """

    def __init__(self, url: str, folder: Path) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise InputError(
                f"{url} needs fsspec: pip install 'stateline[ray]', or give a local folder"
            ) from error
        try:
            self.storage, self.root = url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"cannot use {url}: {reason}; give another place") from error
        self.url, self.folder = url, folder
        self._same: dict[str, tuple[int, int]] = {}

    def fetch(self, below: str = "") -> None:
        """Copy all files of the storage, or of a folder in it, to the local folder.

        A checkpoint that is not whole, because its writer was lost, is left out.
        """
        with self._explained():
            start = f"{self.root}/{below}".rstrip("/")
            self.storage.invalidate_cache()
            for path in self.storage.find(start) if self.storage.exists(start) else []:
                name = path[len(self.root) :].lstrip("/")
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self.storage.get_file(path, str(target))
                self._same[name] = _stamp(target)
        for run in {path.parents[1] for path in self.folder.rglob("checkpoints/step-*")}:
            for broken in [path for path in found(run) if not is_whole(path)]:
                shutil.rmtree(broken)

    def push(self) -> None:
        """Copy new and changed files to the storage, and remove there what has been removed here.

        A file that shows that a folder is complete is copied after all other files.
        """
        files = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*")
            if path.is_file() and not any(p.startswith(".") for p in _parts(path, self.folder))
        }
        with self._explained():
            for name in sorted(files, key=lambda name: (_rank(name), name)):
                self._push_file(name, files[name])
            for name in sorted(self._same.keys() - files.keys(), key=_rank, reverse=True):
                if self.storage.exists(f"{self.root}/{name}"):
                    self.storage.rm_file(f"{self.root}/{name}")
                del self._same[name]

    def _push_file(self, name: str, path: Path) -> None:
        stamp = _stamp(path)
        if self._same.get(name) == stamp:
            return
        target = f"{self.root}/{name}"
        self.storage.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.storage.put_file(str(path), target)
        self._same[name] = stamp

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"cannot use {self.url}: {reason}; give another place") from error


class ResultsFolder(News):
    """Where a comparison writes: a local folder, which may be the copy of one in a storage.

    Attributes:
        folder: The local folder.
        mirror: Keeps the storage up to date; ``None`` if the results stay here.
    """

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        self.folder, self.mirror = folder, mirror

    def planned(self, *_: Any) -> None:
        """Check that the storage can be written to before any work is done."""
        self.save()

    def finished(self, job: Job, run: RunRecord) -> None:  # noqa: ARG002
        """Copy what is new to the storage."""
        self.save()

    def save(self) -> None:
        """Copy what is new to the storage, if there is one."""
        if self.mirror is not None:
            self.mirror.push()


@contextmanager
def results_folder(place: str) -> Iterator[ResultsFolder]:
    """A local folder for results that are kept in a folder or in a storage.

    Args:
        place: A local folder, or a URL that fsspec knows: what is there is fetched at first, and
            what is new is copied there after every run and at the end.

    Raises:
        InputError: If the storage cannot be used.
    """
    if not is_url(place):
        yield ResultsFolder(Path(place))
        return
    with tempfile.TemporaryDirectory(prefix="stateline-") as name:
        mirror = Mirror(place.rstrip("/"), Path(name))
        mirror.fetch()
        kept = ResultsFolder(Path(name), mirror)
        try:
            yield kept
        finally:
            kept.save()


def _parts(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts


def _rank(name: str) -> int:
    """Files of lower rank are copied first."""
    last = name.rpartition("/")[2]
    return 1 + _LAST.index(last) if last in _LAST else 0


def _stamp(path: Path) -> tuple[int, int]:
    """Changes whenever a file is written."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
