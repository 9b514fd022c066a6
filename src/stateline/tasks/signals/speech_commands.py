"""Speech commands: classify words from their sound."""

import csv
from dataclasses import dataclass
from pathlib import Path

from stateline.settings import Count
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask, in_frames
from stateline.tasks.signals.waves import read_wave


@dataclass(eq=False, kw_only=True)
class SpeechCommands(RowsTask):
    """Predict the spoken word from raw sound at 16 kHz.

    Each folder is a class. The lists that come with the data, or the column ``split`` (train,
    valid, test) of an index, define the split. No speaker is in two parts.

    Args:
        frame: Samples per position; 16 are a millisecond.
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition", 2018.
    """

    name = "speech_commands"
    layout = (
        "a folder of Speech Commands (WORD/NAME.wav, and either validation_list.txt and "
        "testing_list.txt or an index.csv with the columns file and split)"
    )
    title = "Speech commands"
    about = (
        "Short words of speakers who are not in the training part. Scores compare only between "
        "runs on the same words and the same number of recordings."
    )

    frame: Count = 16

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read all recordings."""
        parts: dict[str, Rows] = {name: Rows([], []) for name in ("train", "valid", "test")}
        files: dict[str, str] = self.read(path, _part_of_files)
        words = sorted({Path(file).parent.name for file in files})
        for file, part in sorted(files.items()):
            parts[part].inputs.append(self.read(path / file, read_wave))
            parts[part].labels.append(words.index(Path(file).parent.name))
        return *in_frames(parts["train"], parts[self.held_out], self.frame), Classes(words)


def _part_of_files(folder: Path) -> dict[str, str]:
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
