"""Spoken digits: classify digits from their sound."""

import re

from stateline.tasks.classification import ClassificationTask, HeldOut, Rows, in_frames
from stateline.tasks.signals.waves import read_wave

_LAYOUT = "the recordings of the Free Spoken Digit Dataset (a folder of DIGIT_SPEAKER_NUMBER.wav)"
_NAME = re.compile(r"(\d)_([^_]+)_(\d+)\.wav\Z")


class SpokenDigits(ClassificationTask):
    """Predict the spoken digit from raw sound at 8 kHz.

    The Free Spoken Digit Dataset defines the split: recordings 0 to 4 of each speaker and digit
    are the test part, all others are for training. With ``held_out=valid``, for choosing settings,
    recordings 5 to 9 are scored instead. The same speakers are in all parts.

    Args:
        seed: Fixes the order.
        path: Folder of the recordings, or the one that has them in ``recordings``.
        frame: Samples per position; 8 are a millisecond.
        batch_size: Recordings in a training batch.
        held_out: ``test`` or ``valid``.

    Raises:
        InputError: If there are no recordings at ``path``, or one cannot be read.
    """

    name = "spoken_digits"
    layout = _LAYOUT
    title = "Spoken digits"
    about = (
        "Ten digits by few speakers, the same in training and test: shows whether a layer finds "
        "patterns in raw sound, not whether it generalises to other speakers."
    )

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str = "",
        frame: int = 8,
        batch_size: int = 32,
        held_out: HeldOut = "test",
    ) -> None:
        folder = self.find(path)
        folder = folder / "recordings" if (folder / "recordings").is_dir() else folder
        splits: dict[str, Rows] = {name: Rows([], []) for name in ("train", "valid", "test")}
        for file in sorted(folder.glob("*.wav")):
            if name := _NAME.match(file.name):
                number = int(name[3])
                split = "test" if number < 5 else "valid" if number < 10 else "train"
                splits[split].inputs.append(self.read(file, read_wave))
                splits[split].labels.append(int(name[1]))
        training = splits["train"]
        if held_out == "test":
            more = splits["valid"]
            training = Rows(training.inputs + more.inputs, training.labels + more.labels)
        whole, scored = in_frames(training, splits[held_out], frame)
        digits = [str(digit) for digit in range(10)]
        super().__init__(seed, batch_size, training=whole, held_out=scored, classes=digits)
