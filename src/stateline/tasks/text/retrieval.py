"""Retrieval: do two papers cite each other?"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stateline.settings import Count
from stateline.tasks.base import train_settings
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask

_FILES = {"train": "train", "valid": "eval", "test": "test"}

SEPARATOR = 256
"""The token between two texts; the others are bytes."""


@dataclass(eq=False, kw_only=True)
class Retrieval(RowsTask):
    """Read two papers as bytes, and say whether one cites the other.

    The row is the first text, a separator, and the second text. The Long Range Arena encodes the
    two texts separately by one model and classifies both codes together; here a causal model reads
    the second text knowing the first. So scores cannot be compared with the Arena's.

    Args:
        max_len: Bytes of each text that are read.
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Radev et al., "The ACL Anthology Network", 2009; Tay et al., "Long Range Arena", ICLR 2021.
    """

    name = "retrieval"
    layout = (
        "the pairs of papers of the Long Range Arena (a folder with new_aan_pairs.train.tsv, "
        ".eval.tsv and .test.tsv: class, two numbers, two texts, separated by tabs)"
    )
    title = "Retrieval"
    about = "Half of the pairs cite each other. Titles and names of authors in both help a lot."
    training = train_settings(RowsTask, lr=1e-3)
    vocab_size = SEPARATOR + 1
    max_len: Count = 4000

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read the files of two parts."""
        files = (path / f"new_aan_pairs.{_FILES[p]}.tsv" for p in ("train", self.held_out))
        reader = partial(_read_pairs, max_len=self.max_len)
        training, scored = (self.read(file, reader) for file in files)
        return training, scored, Classes(["unrelated", "cited"])


def _read_pairs(path: Path, max_len: int) -> Rows:
    rows = Rows([], [])
    for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        label, _, _, *texts = line.split("\t")
        one, other = (text.encode(errors="surrogateescape")[:max_len] for text in texts)
        rows.inputs.append(np.array([*one, SEPARATOR, *other], dtype=np.int64))
        rows.labels.append((0.0, 1.0).index(float(label)))
    return rows
