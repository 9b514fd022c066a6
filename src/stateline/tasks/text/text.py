"""Text: predict the next byte of held-out files."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from stateline.data import ByteTokenizer
from stateline.data.folder import is_text, list_folder
from stateline.data.splits import held_out_by_hash
from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.files import text_file, user_path
from stateline.settings import within
from stateline.tasks.text.corpus import LongTextTask

# Not part of the library though in its folder, or not code (pydoc_data).
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_SKIPPED |= {"test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(eq=False, kw_only=True)
class Text(LongTextTask):
    """Predict the next byte of a file or of the files in a folder.

    The split is by file: about one file in ten is held out as a whole, chosen by the hash of its
    relative path. Of a single file, the last tenth is held out. The held-out text is cut after
    ``held_out_bytes``; this does not change the training text. Files are joined without a
    separator. Similar files may be in both parts.

    Hidden, empty and binary files (a zero byte in the first kilobyte) of a folder are skipped. The
    whole text is kept in memory.

    Args:
        path: File or folder. By default the standard library (``*.py``) of the running Python.
        held_out_bytes: Largest number of bytes to score.
        **options: See :class:`~stateline.tasks.LongTextTask`; a document is a file.

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
        "the baselines to beat. Scores compare only between runs on the same text (same sha256): "
        "the default text is the library of the running Python and differs between versions."
    )
    tokenizer = ByteTokenizer()
    vocab_size = tokenizer.vocab_size

    path: str | None = None
    held_out_bytes: Annotated[int, within(2)] = 262_144

    def __post_init__(self) -> None:
        super().__post_init__()
        library = f"standard library of Python {platform.python_version()}"
        self.source = library if self.path is None else self.path
        files = _read_files(self.path)
        if not files:
            raise InputError(f"found no text in {self.source}: give a path to a file or folder")
        self._files = tuple(files)
        self._sha256 = _fingerprint(files)
        self._held_out_files, training, held_out = _split(files, self.held_out_bytes)
        self.set_texts(_text_of(training), _text_of(held_out), self.source, "bytes")

    def describe(self) -> Mapping[str, object]:
        """Source, size and hash of the text, and the held-out files."""
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
    """Contents by relative path, sorted by path."""
    root = user_path(sysconfig.get_path("stdlib") if path is None else path, "text")
    if not root.exists():
        raise InputError(
            f"path must be a file or folder, got {str(root)!r}, which does not exist: correct it, "
            "or leave it out for the library of the running Python"
        )
    try:
        if root.is_file():
            contents = text_file(root, "text").read_bytes()
            return {root.name: contents} if contents else {}
        names = list_folder(root, ".py", _SKIPPED) if path is None else list_folder(root)
        files = {name: (root / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename!r} of the text: {error.strerror}; make it readable or "
            "give another path"
        ) from error
    return {name: text for name, text in files.items() if is_text(text)}


def _split(
    files: Mapping[str, bytes], most: int
) -> tuple[tuple[str, ...], list[bytes], list[bytes]]:
    """Names of the held-out files, the files to train on, and ``most`` bytes of held-out files."""
    if len(files) == 1:
        ((name, text),) = files.items()
        cut = len(text) - max(2, len(text) // 10)
        return (name,), [text[:cut]], [text[cut:][:most]]
    order = sorted(files)
    chosen = [order[number] for number in held_out_by_hash(order, share=26 / 256)]
    held_out, names, left = list[bytes](), [], most
    for name in chosen:
        if left > 0:
            held_out.append(files[name][:left])
            names.append(name)
            left -= len(held_out[-1])
    return tuple(names), [files[name] for name in sorted(files.keys() - set(chosen))], held_out


def _text_of(files: list[bytes]) -> TokenText:
    """The files as documents."""
    tokens = np.frombuffer(b"".join(files), dtype=np.uint8)
    return TokenText([len(tokens)], lambda _: tokens, np.cumsum([0, *map(len, files)]))


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in files.items():
        digest.update(b"%s\0%d\0" % (os.fsencode(name), len(text)))
        digest.update(text)
    return digest.hexdigest()
