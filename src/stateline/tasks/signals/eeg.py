"""EEG: classify recordings as healthy, interictal or ictal."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from stateline.tasks.classification import ClassificationTask, Rows, in_frames
from stateline.tasks.objective import ClassMetric

_LAYOUT = "the segments of the Bonn EEG data (Z001.txt, O001.txt, N001.txt, F001.txt, S001.txt ...)"
_NAME = re.compile(r"([ZONFS])(\d+)\.txt\Z", re.IGNORECASE)
_SETS = "ZONFS"


class EEG(ClassificationTask):
    """Classify recordings of one EEG channel (23.6 s, 4,097 samples at 173.61 Hz).

    The five sets of the Bonn data are Z and O (healthy, eyes open and closed), N and F (between
    seizures) and S (during a seizure). Of each set, segment number ``held_out_from`` and the
    later ones are held out. The data do not identify patients, so one patient may be in both parts.

    Args:
        seed: Fixes the order.
        path: Folder with the segments, directly or in subfolders.
        target: ``set`` (five classes) or ``seizure`` (S or not).
        metric: ``accuracy``, or for ``seizure`` also ``auroc``, the area under the ROC curve.
        held_out_from: First number that is held out.
        frame: Samples per position.
        batch_size: Segments in a training batch.

    Raises:
        InputError: If there are no segments at ``path``, one cannot be read, or ``auroc`` is asked
            for five classes.

    References:
        Andrzejak et al., "Indications of nonlinear deterministic and finite-dimensional structures
        in time series of brain electrical activity", Physical Review E 64, 2001.
    """

    name = "eeg"
    layout = _LAYOUT
    title = "EEG"
    about = (
        "A few hundred segments of unknown patients: a score shows only that a model can "
        "distinguish long noisy signals."
    )
    training: ClassVar[Mapping[str, float | str]] = {
        **ClassificationTask.training,
        "steps": 400,
        "eval_every": 100,
    }

    def __init__(
        self,
        seed: int = 0,
        *,
        path: str = "",
        target: Literal["set", "seizure"] = "set",
        metric: ClassMetric = "accuracy",
        held_out_from: int = 69,
        frame: int = 8,
        batch_size: int = 16,
    ) -> None:
        folder = self.find(path)
        training, held_out = Rows([], []), Rows([], [])
        for file in sorted(folder.rglob("*.[tT][xX][tT]")):
            if name := _NAME.match(file.name):
                place = _SETS.index(name[1].upper())
                part = held_out if int(name[2]) >= held_out_from else training
                part.inputs.append(self.read(file, _read_segment))
                part.labels.append(place if target == "set" else int(place == 4))
        whole, scored = in_frames(training, held_out, frame)
        classes = list(_SETS) if target == "set" else ["no seizure", "seizure"]
        super().__init__(
            seed, batch_size, training=whole, held_out=scored, classes=classes, metric=metric
        )


def _read_segment(path: Path) -> np.ndarray:
    values = np.array(path.read_text(encoding="ascii").split(), dtype=np.float32)
    if len(values) == 0:
        raise ValueError("it has no samples")
    if not np.isfinite(values).all():
        raise ValueError("it has a sample that is not a finite number")
    return values
