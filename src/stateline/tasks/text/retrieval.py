"""Retrieval: do two papers cite each other?"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from stateline.settings import at_least
from stateline.tasks.classification import ClassificationTask, HeldOut, Rows

_LAYOUT = (
    "the pairs of papers of the Long Range Arena (a folder with new_aan_pairs.train.tsv, .eval.tsv "
    "and .test.tsv: class, two numbers, two texts, separated by tabs)"
)
_FILES = {"train": "train", "valid": "eval", "test": "test"}

SEPARATOR = 256
"""The token between two texts; the others are bytes."""


class Retrieval(ClassificationTask):
    """Read two papers as bytes, and say whether one cites the other.

    The row is the first text, a separator, and the second text. The Long Range Arena encodes the
    two texts separately by one model and classifies both codes together; here a causal model reads
    the second text knowing the first. Scores are therefore of another task than the Arena's.

    Args:
        seed: Fixes the order.
        path: Folder of the three files.
        max_len: Bytes of each text that are read.
        batch_size: Pairs in a training batch.
        held_out: The part to score: ``test``, or ``valid`` while choosing settings.

    Raises:
        InputError: If the files are not at ``path``, or something else is in them.

    References:
        Radev et al., "The ACL Anthology Network", 2009; Tay et al., "Long Range Arena", ICLR 2021.
    """

    name = "retrieval"
    layout = _LAYOUT
    title = "Retrieval"
    about = "Half of the pairs cite each other. Titles and names of authors in both help a lot."
    training: ClassVar[Mapping[str, float | str]] = {**ClassificationTask.training, "lr": 1e-3}

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str = "",
        max_len: int = 4000,
        batch_size: int = 16,
        held_out: HeldOut = "test",
    ) -> None:
        at_least(1, max_len=max_len)
        folder = self.find(path)
        training, scored = (
            self.read(
                folder / f"new_aan_pairs.{_FILES[part]}.tsv",
                lambda file: _read_pairs(file, max_len),
            )
            for part in ("train", held_out)
        )
        super().__init__(
            seed,
            batch_size,
            training=training,
            held_out=scored,
            classes=["unrelated", "cited"],
            vocab_size=SEPARATOR + 1,
        )


def _read_pairs(path: Path, max_len: int) -> Rows:
    rows = Rows([], [])
    for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        label, _, _, *texts = line.split("\t")
        one, other = (text.encode(errors="surrogateescape")[:max_len] for text in texts)
        rows.inputs.append(np.array([*one, SEPARATOR, *other], dtype=np.int64))
        rows.labels.append((0.0, 1.0).index(float(label)))
    return rows
