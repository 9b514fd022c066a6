"""ListOps: evaluate nested operations on digits."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from stateline.tasks.classification import ClassificationTask, HeldOut, Rows

_LAYOUT = (
    "ListOps as the Long Range Arena has it (a folder with basic_train.tsv, basic_val.tsv and "
    "basic_test.tsv, columns Source and Target)"
)
_WORDS = [*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
_NUMBERS = {word: number for number, word in enumerate(_WORDS)}
_FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}


class ListOps(ClassificationTask):
    """Evaluate nested minima, maxima, medians and sums modulo 10: the answer is one of ten digits.

    As in the Long Range Arena, the parentheses of the files are dropped, since operators open and
    "]" closes an operation. There are 15 tokens: the digits have the ids 0 to 9, followed by
    ``[MIN``, ``[MAX``, ``[MED``, ``[SM`` and ``]``.

    Args:
        seed: Fixes the order.
        path: Folder of the three files.
        batch_size: Expressions in a training batch.
        held_out: The part to score: ``test``, or ``valid`` while choosing settings.

    Raises:
        InputError: If the files are not at ``path``, or something else is in them.

    References:
        Nangia and Bowman, "ListOps: A Diagnostic Dataset for Latent Tree Learning", 2018; Tay et
        al., "Long Range Arena", ICLR 2021.
    """

    name = "listops"
    layout = _LAYOUT
    title = "ListOps"
    about = (
        "Requires a hierarchy over some 2,000 tokens. The ten answers are not equally frequent, so "
        "10 % is not chance. With few expressions to train on, models learn little more than the "
        "first operator."
    )
    training: ClassVar[Mapping[str, float | str]] = {
        **ClassificationTask.training,
        "lr": 1e-3,
    }

    def __init__(
        self, seed: int = 0, *, path: str = "", batch_size: int = 16, held_out: HeldOut = "test"
    ) -> None:
        folder = self.find(path)
        training, scored = (
            Rows(*self.read(folder / _FILES[split], _read_file)) for split in ("train", held_out)
        )
        super().__init__(
            seed,
            batch_size,
            training=training,
            held_out=scored,
            classes=_WORDS[:10],
            vocab_size=len(_WORDS),
        )


def _read_file(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Token numbers and answer of every line except the first."""
    inputs, labels = [], []
    for line in path.read_text(encoding="ascii").splitlines()[1:]:
        source, target = line.split("\t")
        words = source.replace("(", " ").replace(")", " ").split()
        inputs.append(np.array([_NUMBERS[word] for word in words]))
        labels.append("0123456789".index(target))
    return inputs, labels
