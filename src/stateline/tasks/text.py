"""Text: predict the next byte of files that training has not seen."""

import gzip
import hashlib
import lzma
import os
import platform
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from stateline.errors import InputError
from stateline.tasks.base import IGNORE, Batch, CorpusTask, generator

# In the library's folder but not of it, or (pydoc_data) not code.
_PASSED_OVER = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_PASSED_OVER |= {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
_TOKENS_PER_BATCH = 16_384


class Text(CorpusTask):
    """Predict the next byte of a file or a folder of files, the Python library by default.

    The split is by file: a file is held out when the hash of its relative path says so, about one
    in ten, and no part of it is trained on. Of a single file the last tenth is held out. The
    held-out text is cut at ``held_out_bytes``, which leaves the training text as it is. Files are
    joined without a border between them. Files that resemble each other may fall on both sides.

    In a folder, hidden files, empty ones and binary ones (a zero byte in the first kilobyte) are
    passed over. The text is read at once and held in memory.

    Args:
        seed: Fixes every batch; the split does not depend on it.
        path: File or folder. By default the standard library (``*.py``) of the running Python.
        length: Bytes in a training window.
        held_out_bytes: Most bytes to hold out for scoring.
        batch_size: Windows in a training batch.

    Raises:
        InputError: If there is no text at ``path``, if it cannot be read, or if it is shorter
            than one window.

    Example:
        >>> task = Text(length=64)
        >>> task.train_batch(0).tokens.shape
        torch.Size([16, 64])
    """

    title = "Text"
    about = (
        "Bits per byte on held-out files; gzip and xz, which have not seen the training text, are "
        "the marks to beat. Scores compare only between runs on the same text (same sha256): the "
        "default text is the library of the running Python and differs between versions."
    )
    metric = "bits_per_byte"
    higher_is_better = False
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 600,
        "lr": 4e-3,
        "schedule": "cosine",
    }
    vocab_size = 256

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str | None = None,
        length: int = 256,
        held_out_bytes: int = 262_144,
        batch_size: int = 16,
    ) -> None:
        if length < 1 or batch_size < 1 or held_out_bytes < 2:
            raise InputError(
                "length and batch_size must be at least 1 and held_out_bytes at least 2, got "
                f"length={length}, batch_size={batch_size} and held_out_bytes={held_out_bytes}"
            )
        self.seed, self.batch_size = seed, batch_size
        self.train_length, self.eval_lengths = length, (length, 4 * length)
        library = f"standard library of Python {platform.python_version()}"
        self.source = library if path is None else path
        files = _read_files(path)
        if not files:
            raise InputError(f"found no text in {self.source}: give a path to a file or folder")
        self._files = tuple(files)
        self._sha256 = _fingerprint(files)
        self._held_out_files, training, held_out = _split(files, held_out_bytes)
        self._training, self._held_out = (
            np.frombuffer(text, dtype=np.uint8) for text in (training, held_out)
        )
        if len(training) <= length or len(held_out) < 2:
            raise InputError(
                f"{self.source} must give {length + 1} bytes to train on (length + 1) and 2 to "
                f"hold out, got {len(training)} and {len(held_out)}: give more text or lower length"
            )

    def train_batch(self, index: int) -> Batch:
        """Training batch number ``index``: windows at random places."""
        rng = generator(self.seed, "train", index)
        starts = rng.integers(len(self._training) - self.train_length, size=(self.batch_size, 1))
        windows = self._training[starts + np.arange(self.train_length + 1)].astype(np.int64)
        return Batch(torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:]))

    def held_out(self, length: int) -> Iterator[Batch]:
        """The held-out text once, in windows of ``length``, about 16,000 tokens to a batch.

        Every byte but the first is a target once. A window knows nothing of the one before, so
        longer windows give better scores. The last one is filled up with ``IGNORE``.
        """
        if length < 1:
            raise InputError(f"length must be at least 1 byte, got length={length}")
        n_targets = len(self._held_out) - 1
        n_windows = -(-n_targets // length)
        tokens = np.zeros(n_windows * length, dtype=np.int64)
        targets = np.full_like(tokens, IGNORE)
        tokens[:n_targets], targets[:n_targets] = self._held_out[:-1], self._held_out[1:]
        rows = max(1, _TOKENS_PER_BATCH // length)
        return map(
            Batch,
            torch.from_numpy(tokens).view(n_windows, length).split(rows),
            torch.from_numpy(targets).view(n_windows, length).split(rows),
        )

    def baselines(self) -> Mapping[str, float]:
        """Bits per byte of gzip and xz at their best on the held-out text."""
        text = self._held_out.tobytes()
        packed = {
            "gzip": gzip.compress(text, compresslevel=9, mtime=0),
            "xz": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),
        }
        return {name: 8 * len(result) / len(text) for name, result in packed.items()}

    def describe(self) -> Mapping[str, object]:
        """Where the text comes from, its size and hash, and which files are held out."""
        return {
            "source": self.source,
            "n_files": len(self._files),
            "training_bytes": len(self._training),
            "held_out_bytes": len(self._held_out),
            "sha256": self._sha256,
            "held_out_files": self._held_out_files,
            "files": self._files,
        }


def _read_files(path: str | None) -> dict[str, bytes]:
    """Contents by relative path, in its order."""
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    if not root.exists():
        raise InputError(
            f"path must be a file or folder, got {str(root)!r}, which does not exist: correct it, "
            "or leave it out for the library of the running Python"
        )
    try:
        if root.is_file():
            contents = root.read_bytes()
            return {root.name: contents} if contents else {}
        names = _list_folder(root, ".py", _PASSED_OVER) if path is None else _list_folder(root)
        files = {name: (root / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename!r} of the text: {error.strerror}; make it readable or "
            "give another path"
        ) from error
    return {name: text for name, text in files.items() if text and b"\0" not in text[:1024]}


def _list_folder(root: Path, suffix: str = "", passed_over: Collection[str] = ()) -> list[str]:
    """Relative paths of the regular files below ``root``, in order, without hidden ones."""

    def fail(error: OSError) -> None:
        raise error

    names = []
    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in passed_over]
        paths = [Path(folder, name) for name in files if name[0] != "." and name.endswith(suffix)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def _split(files: Mapping[str, bytes], most: int) -> tuple[tuple[str, ...], bytes, bytes]:
    """Names of the held-out files, the training text, and ``most`` bytes of held-out text."""
    if len(files) == 1:
        ((name, text),) = files.items()
        cut = len(text) - max(2, len(text) // 10)
        return (name,), text[:cut], text[cut:][:most]

    def rank(name: str) -> bytes:
        return hashlib.sha256(os.fsencode(name)).digest()

    ranked = sorted(files, key=rank)
    chosen = sum(rank(name)[0] < 26 for name in files)  # 26 of 256: about one in ten
    chosen = min(max(chosen, 1), len(files) - 1)
    held_out, names = b"", []
    for name in ranked[:chosen]:
        if len(held_out) < most:
            held_out += files[name][: most - len(held_out)]
            names.append(name)
    return tuple(names), b"".join(files[name] for name in sorted(ranked[chosen:])), held_out


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in files.items():
        digest.update(b"%s\0%d\0" % (os.fsencode(name), len(text)))
        digest.update(text)
    return digest.hexdigest()
