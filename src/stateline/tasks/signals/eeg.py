"""EEG: classify recordings as healthy, interictal or ictal."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from stateline.settings import Count
from stateline.tasks.base import train_settings
from stateline.tasks.objective import Classes, ClassMetric, Objective, Ranked
from stateline.tasks.rows import HeldOut, Rows, RowsTask, in_frames

_NAME = re.compile(r"([ZONFS])(\d+)\.txt\Z", re.IGNORECASE)
_SETS = "ZONFS"


@dataclass(eq=False, kw_only=True)
class EEG(RowsTask):
    """Classify recordings of one EEG channel (23.6 s, 4,097 samples at 173.61 Hz).

    The five sets of the Bonn data are Z and O (healthy, eyes open and closed), N and F (between
    seizures) and S (during a seizure). Of each set, segment number ``held_out_from`` and the
    later ones are held out. The data do not identify patients, so one patient may be in both parts.
    Segments lie in the folder, or in subfolders.

    Args:
        target: ``set`` (five classes) or ``seizure`` (S or not).
        metric: ``accuracy``, or for ``seizure`` also ``auroc``, the area under the ROC curve.
        held_out_from: First number that is held out.
        frame: Samples per position.
        **options: See :class:`~stateline.tasks.RowsTask`; there is no ``held_out``.

    References:
        Andrzejak et al., "Indications of nonlinear deterministic and finite-dimensional structures
        in time series of brain electrical activity", Physical Review E 64, 2001.
    """

    name = "eeg"
    layout = (
        "the segments of the Bonn EEG data (Z001.txt, O001.txt, N001.txt, F001.txt, S001.txt ...)"
    )
    title = "EEG"
    about = (
        "A few hundred segments of unknown patients: a score shows only that a model can "
        "distinguish long noisy signals."
    )
    training = train_settings(RowsTask, steps=400, eval_every=100)

    target: Literal["set", "seizure"] = "set"
    metric: ClassMetric = "accuracy"
    held_out_from: int = 69
    frame: Count = 8
    held_out: HeldOut = field(default="test", init=False)

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read all segments."""
        training, held_out = Rows([], []), Rows([], [])
        for file in sorted(path.rglob("*.[tT][xX][tT]")):
            if name := _NAME.match(file.name):
                place = _SETS.index(name[1].upper())
                part = held_out if int(name[2]) >= self.held_out_from else training
                part.inputs.append(self.read(file, _read_segment))
                part.labels.append(place if self.target == "set" else int(place == 4))
        classes = list(_SETS) if self.target == "set" else ["no seizure", "seizure"]
        objective = (Ranked if self.metric == "auroc" else Classes)(classes)
        return *in_frames(training, held_out, self.frame), objective


def _read_segment(path: Path) -> np.ndarray:
    values = np.array(path.read_text(encoding="ascii").split(), dtype=np.float32)
    if len(values) == 0:
        raise ValueError("it has no samples")
    if not np.isfinite(values).all():
        raise ValueError("it has a sample that is not a finite number")
    return values
