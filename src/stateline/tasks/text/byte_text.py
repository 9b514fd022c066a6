"""Byte text: classify a text from its bytes."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stateline.errors import InputError
from stateline.settings import Count
from stateline.tasks.base import train_settings
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask


@dataclass(eq=False, kw_only=True)
class ByteText(RowsTask):
    """Predict the class of a text from its bytes, for example the sentiment of a review.

    The layout says which texts are held out: in JSON lines a ``split`` (train, valid, test), or a
    ``fold`` (0 to 2 to train on, 3 valid, 4 test); in a CSV file ``is_valid``; for the IMDb reviews
    the folder ``test``.

    Args:
        max_len: Bytes of a text that are read.
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Tay et al., "Long Range Arena", ICLR 2021, which takes the IMDb reviews (Maas et al., 2011).
    """

    name = "byte_text"
    layout = (
        "labelled texts: JSON lines (text, label, and split or fold), a CSV file (text, label, "
        "is_valid), or the folder of the IMDb reviews (train/pos/*.txt ...)"
    )
    title = "Text by bytes"
    about = (
        "A model must first learn words from letters, for which a thousand texts are few; with so "
        "few, counting words does better."
    )
    training = train_settings(RowsTask, lr=1e-3)
    vocab_size = 256
    max_len: Count = 4096

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read all texts, and keep two parts."""
        kind = "folder" if path.is_dir() else path.suffix
        if kind not in _READERS:
            raise InputError(f"the task {self.name} reads {self.layout}, got {self.path!r}")
        texts: list[tuple[str, str, str]] = self.read(path, _READERS[kind])
        classes = sorted({label for _, label, _ in texts})
        parts = {"train": Rows([], []), self.held_out: Rows([], [])}
        for part, label, text in texts:
            if part in parts and text:
                data = text.encode(errors="replace")[: self.max_len]
                parts[part].inputs.append(np.frombuffer(data, dtype=np.uint8).astype(np.int64))
                parts[part].labels.append(classes.index(label))
        return parts["train"], parts[self.held_out], Classes(classes)


def _read_lines(path: Path) -> list[tuple[str, str, str]]:
    """Split, label and text of JSON lines."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(_split(row), str(row["label"]), str(row["text"])) for row in rows]


def _split(row: Mapping[str, Any]) -> str:
    folds = ("train", "train", "train", "valid", "test")
    return str(row["split"]) if "split" in row else folds[int(row["fold"]) % len(folds)]


def _read_table(path: Path) -> list[tuple[str, str, str]]:
    """Split, label and text of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            ("valid" if row["is_valid"].lower() == "true" else "train", row["label"], row["text"])
            for row in csv.DictReader(file)
        ]


def _read_folder(path: Path) -> list[tuple[str, str, str]]:
    """Split, label and text of a folder of reviews."""
    return [
        (split, label, file.read_text(encoding="utf-8"))
        for split in ("train", "test")
        for label in ("neg", "pos")
        for file in sorted((path / split / label).glob("*.txt"))
    ]


_READERS = {".jsonl": _read_lines, ".csv": _read_table, "folder": _read_folder}
