"""Sequential images: classify an image from its sequence of pixels."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from stateline.settings import Count
from stateline.tasks.base import generator
from stateline.tasks.objective import Classes, Objective
from stateline.tasks.rows import Rows, RowsTask, in_frames
from stateline.tasks.signals.tables import check_size

_CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_CIFAR_PIXELS = 32 * 32
_NAMES = ("train", "valid", "test")


@dataclass(eq=False, kw_only=True)
class SequentialImage(RowsTask):
    """Classify a grey-scale image, reading its pixels row by row.

    MNIST has a test part; the last twelfth of its training images is the validation part. If there
    are only the 10,000 test images, they are split into 8,000, 1,000 and 1,000; scores then cannot
    be compared with published ones. CIFAR-10 is split as its files are.

    Args:
        permuted: Whether the pixels are read in a random order, which is the same for all seeds.
        frame: Pixels per position.
        **options: See :class:`~stateline.tasks.RowsTask`.

    References:
        Le et al., "A Simple Way to Initialize Recurrent Networks of Rectified Linear Units", 2015;
        Tay et al., "Long Range Arena", ICLR 2021, for CIFAR-10 in grey.
    """

    name = "sequential_image"
    layout = (
        "images in grey: a folder with MNIST (train-images-idx3-ubyte.gz, "
        "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz; or the "
        "last two alone) or CIFAR-10 (train_gray.bin, valid_gray.bin, test_gray.bin: a byte for "
        "the class, then the pixels)"
    )
    title = "Sequential images"
    about = (
        "Neighbouring pixels are an image's width apart, or at any distance if the pixels are "
        "permuted. Scores compare only between runs on the same images."
    )

    batch_size: Count = 32
    permuted: bool = False
    frame: Count = 1

    def load(self, path: Path) -> tuple[Rows, Rows, Objective]:
        """Read the images of two parts."""
        parts: dict[str, Rows] = self.read(path, _read_images)
        training, scored = parts["train"], parts[self.held_out]
        if self.permuted:
            order = generator(0, "pixels").permutation(len(training.inputs[0]))
            training, scored = (
                Rows([image[order] for image in rows.inputs], rows.labels)
                for rows in (training, scored)
            )
        cifar = (path / "train_gray.bin").exists()
        classes = Classes(_CIFAR if cifar else "0123456789")
        return *in_frames(training, scored, self.frame), classes


def _read_images(folder: Path) -> dict[str, Rows]:
    if (folder / "train_gray.bin").exists():
        return {name: _read_records(folder / f"{name}_gray.bin") for name in _NAMES}
    if not (folder / "t10k-images-idx3-ubyte.gz").exists():
        raise ValueError("it has no such files")
    test = _read_mnist(folder, "t10k")
    if not (folder / "train-images-idx3-ubyte.gz").exists():
        a, b = (len(test.inputs) * tenths // 10 for tenths in (8, 9))
        return {"train": _part(test, 0, a), "valid": _part(test, a, b), "test": _part(test, b)}
    train = _read_mnist(folder, "train")
    cut = len(train.inputs) * 11 // 12
    return {"train": _part(train, 0, cut), "valid": _part(train, cut), "test": test}


def _part(rows: Rows, start: int, end: int | None = None) -> Rows:
    return Rows(rows.inputs[start:end], rows.labels[start:end])


def _read_records(path: Path) -> Rows:
    """Records of a class and the pixels."""
    check_size(4 * path.stat().st_size)
    records = np.fromfile(path, dtype=np.uint8)
    if len(records) % (1 + _CIFAR_PIXELS):
        raise ValueError(f"{path.name} is no whole number of records")
    records = records.reshape(-1, 1 + _CIFAR_PIXELS)
    return _rows(records[:, 1:], records[:, 0], path)


def _read_mnist(folder: Path, name: str) -> Rows:
    """Images and classes of one part."""
    path = folder / f"{name}-labels-idx1-ubyte.gz"
    labels, pixels = _read_idx(path, 1), _read_idx(folder / f"{name}-images-idx3-ubyte.gz", 3)
    if len(labels) != len(pixels):
        raise ValueError(f"the images and the classes of {name} are not of one number")
    return _rows(pixels.reshape(len(pixels), -1), labels, path)


def _read_idx(path: Path, axes: int) -> UInt8[np.ndarray, "..."]:
    """An array in the format IDX: a header of 4 bytes and 4 for each axis, then bytes."""
    with gzip.open(path) as file:
        shape = np.frombuffer(file.read(4 + 4 * axes), ">u4")[1:].tolist()
        count = math.prod(shape)
        check_size(4 * count)
        values = np.frombuffer(file.read(count + 1), np.uint8)
    if len(shape) != axes or len(values) != count:
        raise ValueError(f"{path.name} does not have the number of bytes that its header says")
    return values.reshape(shape)


def _rows(
    pixels: UInt8[np.ndarray, "rows pixels"], labels: UInt8[np.ndarray, " rows"], path: Path
) -> Rows:
    if labels.size and labels.max() > 9:
        raise ValueError(f"{path.name} has the class {labels.max()}, and there are 0 to 9")
    return Rows(list(pixels.astype(np.float32)), labels.tolist())
