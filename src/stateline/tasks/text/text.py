"""Text: predict the next byte of held-out files."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from stateline.data import ByteTokenizer, Tokenizer
from stateline.data.folder import is_text, list_folder
from stateline.data.splits import held_out_by_hash
from stateline.data.token_text import TokenText
from stateline.errors import InputError
from stateline.files import user_path
from stateline.settings import at_least
from stateline.tasks.text.corpus import Documents, TextTask, eval_lengths

# Not part of the library though in its folder, or not code (pydoc_data).
_PASSED_OVER = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_PASSED_OVER |= {"test", "tests", "idlelib", "lib2to3", "turtledemo"}

HELD_OUT = 26 / 256
"""Share of the files to hold out."""


class Text(TextTask):
    """Predict the next byte of a file or of the files in a folder.

    The split is by file: about one file in ten is held out as a whole, chosen by the hash of its
    relative path. Of a single file, the last tenth is held out. The held-out text is cut after
    ``held_out_bytes``; this does not change the training text. Files are joined without a
    separator. Similar files may be in both parts.

    Hidden, empty and binary files (a zero byte in the first kilobyte) of a folder are skipped. The
    whole text is kept in memory.

    Args:
        seed: Fixes every batch; the split does not depend on it.
        path: File or folder. By default the standard library (``*.py``) of the running Python.
        length: Bytes in a training window.
        held_out_bytes: Largest number of bytes to score.
        batch_size: Windows in a training batch.
        documents: ``"join"`` reads the files as one long text. With ``"separate"``, windows end
            with their file. With ``"pack"``, too, but a row holds several files, or parts of them.
        longest: Score at ``length``, at its doublings up to this length, and at it; by default at
            ``length`` and four times ``length``.
        carried: Score the held-out text in ``batch_size`` rows with carried state, as models with a
            memory are scored, instead of in windows that each begin with an empty state.

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
    training: ClassVar[Mapping[str, float | str]] = {
        "steps": 600,
        "lr": 4e-3,
        "schedule": "cosine",
    }
    tokenizer: Tokenizer = ByteTokenizer()
    vocab_size = tokenizer.vocab_size

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str | None = None,
        length: int = 256,
        held_out_bytes: int = 262_144,
        batch_size: int = 16,
        documents: Documents = "join",
        longest: int | None = None,
        carried: bool = False,
    ) -> None:
        at_least(1, length=length, batch_size=batch_size)
        at_least(2, held_out_bytes=held_out_bytes)
        self.seed, self.batch_size = seed, batch_size
        self.train_length, self.eval_lengths = length, eval_lengths(length, longest)
        self.carried, self.documents = carried, documents
        library = f"standard library of Python {platform.python_version()}"
        self.source = library if path is None else path
        files = _read_files(path)
        if not files:
            raise InputError(f"found no text in {self.source}: give a path to a file or folder")
        self._files = tuple(files)
        self._sha256 = _fingerprint(files)
        self._held_out_files, training, held_out = _split(files, held_out_bytes)
        self._training, self._held_out = (
            _text_of(part, documents) for part in (training, held_out)
        )
        windows = np.diff(self._training.borders)
        needed = length + 1 if len(windows) == 1 and documents != "pack" else 2
        scored = int(np.diff(self._held_out.borders).max(initial=0))
        if windows.max() < needed or scored < 2:
            raise InputError(
                f"{self.source} must give {needed} bytes in a row to train on and 2 to hold out, "
                f"got {windows.max()} and {scored}: give more text or lower length"
            )

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
    """Contents by relative path, in its order."""
    root = user_path(sysconfig.get_path("stdlib") if path is None else path, "text")
    if not root.exists():
        raise InputError(
            f"path must be a file or folder, got {str(root)!r}, which does not exist: correct it, "
            "or leave it out for the library of the running Python"
        )
    try:
        if root.is_file():
            contents = root.read_bytes()
            return {root.name: contents} if contents else {}
        names = list_folder(root, ".py", _PASSED_OVER) if path is None else list_folder(root)
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
    chosen = [order[number] for number in held_out_by_hash(order, HELD_OUT)]
    held_out, names, room = list[bytes](), [], most
    for name in chosen:
        if room > 0:
            held_out.append(files[name][:room])
            names.append(name)
            room -= len(held_out[-1])
    return tuple(names), [files[name] for name in sorted(files.keys() - set(chosen))], held_out


def _text_of(files: list[bytes], documents: Documents) -> TokenText:
    """The files as documents, or joined."""
    tokens = np.frombuffer(b"".join(files), dtype=np.uint8)
    borders = np.cumsum([0, *map(len, files)])
    text = TokenText([len(tokens)], lambda _: tokens, borders)
    return text.joined() if documents == "join" else text


def _fingerprint(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in files.items():
        digest.update(b"%s\0%d\0" % (os.fsencode(name), len(text)))
        digest.update(text)
    return digest.hexdigest()
