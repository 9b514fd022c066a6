"""Spoken digits: classify digits from their sound."""

import re
from dataclasses import dataclass
from pathlib import Path

from stateline.settings import Count
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask, in_frames
from stateline.tasks.signals.waves import read_wave

_NAME = re.compile(r"(\d)_([^_]+)_(\d+)\.wav\Z")


@dataclass(eq=False, kw_only=True)
class SpokenDigits(RowsTask):
    """Predict the spoken digit from raw sound at 8 kHz.

    The Free Spoken Digit Dataset defines the split: recordings 0 to 4 of each speaker and digit
    are the test part, all others are for training. With ``held_out=valid``, for choosing settings,
    recordings 5 to 9 are scored instead. The same speakers are in all parts. The path is the folder
    of the recordings, or the one that has them in ``recordings``.

    Args:
        frame: Samples per position; 8 are a millisecond.
        **options: See :class:`~stateline.tasks.RowsTask`.
    """

    name = "spoken_digits"
    layout = (
        "the recordings of the Free Spoken Digit Dataset (a folder of DIGIT_SPEAKER_NUMBER.wav)"
    )
    title = "Spoken digits"
    about = (
        "Ten digits by few speakers, the same in training and test: shows whether a layer finds "
        "patterns in raw sound, not whether it generalises to other speakers."
    )

    batch_size: Count = 32
    frame: Count = 8

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read all recordings."""
        inside = path / "recordings"
        parts: dict[str, Rows] = {name: Rows([], []) for name in ("train", "valid", "test")}
        for file in sorted((inside if inside.is_dir() else path).glob("*.wav")):
            if name := _NAME.match(file.name):
                number = int(name[3])
                part = "test" if number < 5 else "valid" if number < 10 else "train"
                parts[part].inputs.append(self.read(file, read_wave))
                parts[part].labels.append(int(name[1]))
        training = parts["train"]
        if self.held_out == "test":
            more = parts["valid"]
            training = Rows(training.inputs + more.inputs, training.labels + more.labels)
        parts_in_frames = in_frames(training, parts[self.held_out], self.frame)
        return *parts_in_frames, Classes("0123456789")
