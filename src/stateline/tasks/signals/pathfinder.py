"""Pathfinder: do two dots in an image lie on one dashed path?"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from stateline.errors import needed
from stateline.settings import Count
from stateline.tasks.base import generator, train_settings
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask, in_frames

LARGEST = 1 << 24
"""Pixels that an image may have."""

_PARTS = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}


@dataclass(eq=False, kw_only=True)
class Pathfinder(RowsTask):
    """Read the pixels of an image row by row, and say whether a path joins its two dots.

    Images of 32 x 32 pixels are Pathfinder, images of 128 x 128 are Path-X. In a line of the
    metadata, the first two words are the folder and the name of an image, and the fourth is its
    class. Reading them needs Pillow, which is in ``stateline[images]``.

    As in the Long Range Arena, 80 % of the images are trained on, and 10 % each are for validation
    and test. The files do not define this split: here it is by a random order, the same for all
    seeds; other code splits differently. The path is the folder of one level of difficulty; the
    Arena uses ``curv_contour_length_14``.

    Args:
        frame: Pixels per position.
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Linsley et al., "Learning long-range spatial dependencies with horizontal gated recurrent
        units", NeurIPS 2018; Tay et al., "Long Range Arena", ICLR 2021.
    """

    name = "pathfinder"
    layout = (
        "Pathfinder as the Long Range Arena has it (a folder with metadata/0.npy ..., lines of "
        "text, and the PNG images that these name, such as pathfinder32/curv_contour_length_14)"
    )
    title = "Pathfinder"
    about = (
        "Half of the images are connected, so 50 % is chance, and most models stay there for a "
        "long time before they learn anything."
    )
    training = train_settings(RowsTask, lr=1e-3)
    batch_size: Count = 32
    frame: Count = 1

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read the images of two parts."""
        named = self.read(path, _read_metadata)
        order = generator(0, "pathfinder").permutation(len(named))

        def part(name: str) -> Rows:
            first, last = (round(share * len(named)) for share in _PARTS[name])
            chosen = [named[place] for place in order[first:last]]
            images = [self.read(file, read_grey).ravel() for file, _ in chosen]
            return Rows(images, [label for _, label in chosen])

        parts = in_frames(part("train"), part(self.held_out), self.frame)
        return *parts, Classes(["apart", "connected"])


def _read_metadata(folder: Path) -> list[tuple[Path, int]]:
    """File and class of every image."""
    found = []
    for file in sorted((folder / "metadata").iterdir(), key=lambda file: file.name):
        for line in file.read_text(encoding="ascii").splitlines():
            where, name, _, label, *_ = line.split()
            found.append((folder / where / name, ("0", "1").index(label)))
    return found


def read_grey(path: Path) -> UInt8[np.ndarray, "rows columns"]:
    """The pixels of a PNG image in grey; anything else is refused."""
    needed("PIL", "reading images", "images")
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        if image.mode != "L" or image.width * image.height > LARGEST:
            raise ValueError(
                "it must be a PNG image in grey with 8 bits per pixel, of at most "
                f"{LARGEST:,} pixels"
            )
        return np.asarray(image)
