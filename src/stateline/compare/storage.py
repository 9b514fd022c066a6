"""Results in a storage that fsspec knows, such as ``s3://bucket/folder``."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stateline.compare.news import News
from stateline.errors import InputError, needed, reason
from stateline.runs.folder import RESULT, RESULTS
from stateline.runs.job import Job
from stateline.runs.results import RunRecord
from stateline.train.folder import MANIFEST, found, is_whole

_LAST = (MANIFEST, RESULT, RESULTS)
"""Files that show that a folder is complete; they are written after all other files."""


class Mirror(News):
    """A local folder and its copy in a storage, which is kept up to date with every finished run.

    Args:
        url: Folder in the storage.
        folder: Local folder.

    Raises:
        InputError: If fsspec is not installed, or does not know such a URL.
    """

    def __init__(self, url: str, folder: Path) -> None:
        fsspec = needed("fsspec", f"{url}, which is no local folder,", "ray")
        self.url, self.folder = url, folder
        with self._explained():
            self.storage, self.root = fsspec.core.url_to_fs(url)
        self._same: dict[str, tuple[int, int]] = {}

    def planned(self, jobs: int, done: int) -> None:  # noqa: ARG002
        """Find out whether the storage can be written to, before any work is done."""
        self.push()

    def finished(self, job: Job, run: RunRecord) -> None:  # noqa: ARG002
        """Copy what is new."""
        self.push()

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
        names = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        here = {name.as_posix() for name in names if not any(p[0] == "." for p in name.parts)}
        with self._explained():
            for name in sorted(here, key=lambda name: (_rank(name), name)):
                self._push_file(name)
            for name in sorted(self._same.keys() - here, key=_rank, reverse=True):
                if self.storage.exists(f"{self.root}/{name}"):
                    self.storage.rm_file(f"{self.root}/{name}")
                del self._same[name]

    def _push_file(self, name: str) -> None:
        path, target = self.folder / name, f"{self.root}/{name}"
        if self._same.get(name) == (stamp := _stamp(path)):
            return
        self.storage.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.storage.put_file(str(path), target)
        self._same[name] = stamp

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"cannot use {self.url}: {reason(error)}; give another place"
            ) from error


@contextmanager
def results_folder(place: str) -> Iterator[tuple[Path, Mirror | None]]:
    """A local folder for results that are kept in a folder or in a storage.

    Args:
        place: A local folder, or a URL that fsspec knows. Files at the URL are fetched at first,
            and new files are copied there at the end, and by the mirror after every run.

    Yields:
        The folder; for a URL also the mirror, which observes the comparison.

    Raises:
        InputError: If the storage cannot be used.
    """
    if "://" not in place:
        yield Path(place), None
        return
    with tempfile.TemporaryDirectory(prefix="stateline-") as name:
        mirror = Mirror(place.rstrip("/"), Path(name))
        mirror.fetch()
        try:
            yield Path(name), mirror
        finally:
            mirror.push()


def _rank(name: str) -> int:
    """Files of lower rank are copied first."""
    last = name.rpartition("/")[2]
    return 1 + _LAST.index(last) if last in _LAST else 0


def _stamp(path: Path) -> tuple[int, int]:
    """A value that changes whenever the file is written."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
