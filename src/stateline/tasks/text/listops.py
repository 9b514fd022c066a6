"""ListOps: evaluate nested operations on digits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stateline.tasks.base import train_settings
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask

_WORDS = [*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
_NUMBERS = {word: number for number, word in enumerate(_WORDS)}
_FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}


@dataclass(eq=False, kw_only=True)
class ListOps(RowsTask):
    """Evaluate nested minima, maxima, medians and sums modulo 10: the answer is one of ten digits.

    As in the Long Range Arena, the parentheses of the files are dropped, since operators open and
    "]" closes an operation. There are 15 tokens: the digits have the ids 0 to 9, followed by
    ``[MIN``, ``[MAX``, ``[MED``, ``[SM`` and ``]``.

    Args:
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Nangia and Bowman, "ListOps: A Diagnostic Dataset for Latent Tree Learning", 2018; Tay et
        al., "Long Range Arena", ICLR 2021.
    """

    name = "listops"
    layout = (
        "ListOps as the Long Range Arena has it (a folder with basic_train.tsv, basic_val.tsv and "
        "basic_test.tsv, columns Source and Target)"
    )
    title = "ListOps"
    about = (
        "Requires a hierarchy over some 2,000 tokens. The ten answers are not equally frequent, so "
        "10 % is not chance. With few expressions to train on, models learn little more than the "
        "first operator."
    )
    training = train_settings(RowsTask, lr=1e-3)
    vocab_size = len(_WORDS)

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read the files of two parts."""
        files = (path / _FILES[part] for part in ("train", self.held_out))
        training, scored = (self.read(file, _read_file) for file in files)
        return training, scored, Classes(_WORDS[:10])


def _read_file(path: Path) -> Rows:
    """Token numbers and answer of every line except the first."""
    rows = Rows([], [])
    for line in path.read_text(encoding="ascii").splitlines()[1:]:
        source, target = line.split("\t")
        words = source.replace("(", " ").replace(")", " ").split()
        rows.inputs.append(np.array([_NUMBERS[word] for word in words]))
        rows.labels.append("0123456789".index(target))
    return rows
