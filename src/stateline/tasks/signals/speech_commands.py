"""Speech commands: classify words from their sound."""

import csv
from pathlib import Path

from stateline.tasks.classification import ClassificationTask, HeldOut, Rows, in_frames
from stateline.tasks.signals.waves import read_wave

_LAYOUT = (
    "a folder of Speech Commands (WORD/NAME.wav, and either validation_list.txt and "
    "testing_list.txt or an index.csv with the columns file and split)"
)


class SpeechCommands(ClassificationTask):
    """Predict the spoken word from raw sound at 16 kHz.

    Each folder is a class. The lists that come with the data, or the column ``split`` (train,
    valid, test) of an index, define the split. No speaker is in two parts.

    Args:
        seed: Fixes the order.
        path: Folder of the words.
        frame: Samples per position; 16 are a millisecond.
        batch_size: Recordings in a training batch.
        held_out: The part to score: ``test``, or ``valid`` while choosing settings.

    Raises:
        InputError: If the data at ``path`` are not arranged like this, or a file cannot be read.

    References:
        Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition", 2018.
    """

    name = "speech_commands"
    layout = _LAYOUT
    title = "Speech commands"
    about = (
        "Short words of speakers who are not in the training part. Scores compare only between "
        "runs on the same words and the same number of recordings."
    )

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str = "",
        frame: int = 16,
        batch_size: int = 16,
        held_out: HeldOut = "test",
    ) -> None:
        folder = self.find(path)
        splits: dict[str, Rows] = {name: Rows([], []) for name in ("train", "valid", "test")}
        files: dict[str, str] = self.read(folder, _split_of_files)
        words = sorted({Path(file).parent.name for file in files})
        for file, split in sorted(files.items()):
            splits[split].inputs.append(self.read(folder / file, read_wave))
            splits[split].labels.append(words.index(Path(file).parent.name))
        whole, scored = in_frames(splits["train"], splits[held_out], frame)
        super().__init__(seed, batch_size, training=whole, held_out=scored, classes=words)


def _split_of_files(folder: Path) -> dict[str, str]:
    """The part that each recording belongs to, by its path in the folder."""
    index = folder / "index.csv"
    if index.exists():
        with index.open(encoding="utf-8", newline="") as file:
            return {row["file"]: row["split"] for row in csv.DictReader(file)}
    lists = {"valid": "validation_list.txt", "test": "testing_list.txt"}
    found = {
        line: split
        for split, name in lists.items()
        for line in (folder / name).read_text(encoding="utf-8").split()
    }
    words = (file.relative_to(folder).as_posix() for file in folder.glob("[!_]*/*.wav"))
    return {file: found.get(file, "train") for file in words}
